"""Ranks on hosts, one on each, that take some steps by one method in each turn, and say how long a step took.

Each is a process that has torch imported and forks one for every turn. So a turn starts at once, has the machine for
itself, and leaves nothing behind for the next: no threads, connections or memory of another method.
"""

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from agreeing import METHODS, Step
from hosts import Host
from sleeping import SleepingResNet
from turns import Missing

TIMEOUT = timedelta(minutes=5)  # for a rank whose peers have failed
FIRST_PORT = 29500
QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "LOGURU_LEVEL": "ERROR"}


@dataclass(frozen=True)
class Turn:
    """Of one step: the slowest rank's seconds, and the bytes that a rank sent, the mean over ranks."""

    seconds: float
    sent_bytes: float


@dataclass(frozen=True)
class Work:
    """What a turn consists of."""

    warm_steps: int
    steps: int
    layer_seconds: float


class Ranks:
    """The parent's side. `command` must call `serve` in turn."""

    def __init__(self, hosts: Sequence[Host], command: list[str]) -> None:
        self._turns = 0
        self._processes = []
        for rank, host in enumerate(hosts):
            place = {"RANK": rank, "WORLD_SIZE": len(hosts), "GROUP_RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            network = {"MASTER_ADDR": hosts[0].address, "GLOO_SOCKET_IFNAME": host.interface}
            env = {**QUIET, **network, **{name: str(number) for name, number in place.items()}}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._processes.append(host.start([sys.executable, *command], env, **pipes))

    def turn(self, method: str) -> Turn:
        port, self._turns = FIRST_PORT + self._turns, self._turns + 1
        for process in self._processes:
            print(method, port, file=process.stdin, flush=True)
        answers = [json.loads(process.stdout.readline() or "{}") for process in self._processes if process.stdout]
        if missing := answers[0].get("missing"):
            raise Missing(missing)
        if not all(answers):
            raise SystemExit(f"{method} failed; its own words are above")
        seconds = max(answer["seconds"] for answer in answers)
        return Turn(seconds, sum(answer["bytes"] for answer in answers) / len(answers))


def serve(work: Work) -> None:
    """The rank's side: a turn for each line, until there are no more."""
    for line in sys.stdin:
        method, os.environ["MASTER_PORT"] = line.split()
        pid = os.fork()
        if pid == 0:
            _take_turn(method, work)
        _, status = os.waitpid(pid, 0)
        if status:
            print("{}", flush=True)


def _take_turn(method: str, work: Work) -> None:
    """Ends the process, without waiting for what is still under way."""
    status = 1
    try:
        print(json.dumps(_measure(method, work)), flush=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _measure(method: str, work: Work) -> dict[str, float] | dict[str, str]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        step = METHODS[method](SleepingResNet(work.layer_seconds))
    except ImportError as error:
        return {"missing": str(error)}
    for _ in range(work.warm_steps):
        step()
    dist.barrier()
    step()  # afterwards as much is under way as after every step
    answer = _time_steps(step, work.steps)
    dist.barrier()
    return answer


def _time_steps(step: Step, num_steps: int) -> dict[str, float]:
    sent, started = _sent_bytes(), time.perf_counter()
    for _ in range(num_steps):
        step()
    seconds = time.perf_counter() - started
    return {"seconds": seconds / num_steps, "bytes": (_sent_bytes() - sent) / num_steps}


def _sent_bytes() -> int:
    """With headers, and what was sent again."""
    counter = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics/tx_bytes")
    return int(counter.read_text(encoding="utf-8"))
