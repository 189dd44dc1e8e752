"""Ranks that stay: started once, they run one scenario after another. Importing torch is what costs.

A scenario is a function of tests/scenarios.py that takes `ranks` and JSON, and gives JSON; every rank runs it.
"""

import json
import os
import selectors
import socket
import subprocess
import sys
import traceback
from typing import Any

PATIENCE_SECONDS = 120


class RankPool:
    def __init__(self, size: int) -> None:
        self._size = size
        self._processes: list[subprocess.Popen[bytes]] = []

    def _start(self) -> None:
        size = self._size
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {
            "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }  # fmt: skip
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-W", "error::UserWarning:fortyfold", __file__],
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(size)
        ]

    def run(self, scenario: str, **arguments: Any) -> list[Any]:
        """Each rank's answer. An exception on any rank is an AssertionError here, with its traceback; the others may
        wait for it for ever, so all are started anew for the next scenario."""
        if not self._processes:
            self._start()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([scenario, arguments]).encode() + b"\n")
            process.stdin.flush()
        try:
            return self._answers()
        except BaseException:
            self.close()
            raise

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self._size:
                ready = selector.select(PATIENCE_SECONDS)
                assert ready, f"only ranks {sorted(answers)} have answered"
                for key, _ in ready:
                    line = self._processes[key.data].stdout.readline()
                    assert line, f"rank {key.data} has ended"
                    answer = json.loads(line)
                    assert "error" not in answer, f"rank {key.data}: {answer['error']}"
                    answers[key.data] = answer["result"]
        return [answers[rank] for rank in range(self._size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._processes = []


def _serve() -> None:
    import scenarios

    from fortyfold.parallel.ranks import joined
    from fortyfold.spec.parent import die_with_parent

    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with joined() as ranks:
        for line in sys.stdin:
            name, arguments = json.loads(line)
            try:
                answer = {"result": getattr(scenarios, name)(ranks, **arguments)}
            except Exception:
                answer = {"error": traceback.format_exc()}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
