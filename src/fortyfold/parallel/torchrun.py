"""`python -m fortyfold.parallel.torchrun`: torchrun on one node, in a process that says how its workers ended.

Its stdout is one line of JSON (spec.failure.Ending), at the end; what workers print goes to stderr. It is torchrun's
own machinery with static rendezvous and no restarts, in a process of its own since that imports torch, owns signal
handlers and may be killed. It dies with its parent, and workers that call `die_with_parent` die with it.

When a worker fails, the others get SIGTERM and SHUTDOWN_SECONDS later SIGKILL, which ends stopped ones, too. There
torch (2.6 to 2.13) heeds neither --shutdown-timeout nor its environment variable but waits 30 s, hence
`_shorten_shutdown`.
"""

import argparse
import json
import logging
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fortyfold.parallel.failure import OURS
from fortyfold.spec.failure import Ending, Failure, one_line, signal_name
from fortyfold.spec.parent import die_with_parent, parent_variable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.elastic.multiprocessing import SubprocessContext
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

SHUTDOWN_SECONDS = 5
MONITOR_SECONDS = 0.1
MOST_FILES = 65536
END = signal.SIGUSR2
"""What ends this process and its workers. The usual signals do not: a scheduler sends those to all processes at once,
the launcher passes them on as a request, and the ranks save. Workers take over the ones that they listen to."""
HEARD_BY_OTHERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def main(arguments: Sequence[str]) -> int:
    """Run the workers; gives 0 when all of them ended well, else 1."""
    die_with_parent()
    for number in HEARD_BY_OTHERS:
        signal.signal(number, signal.SIG_IGN)
    _allow_files()
    options = _parse(arguments)
    answer = os.dup(1)  # not inherited by the workers
    os.dup2(2, 1)
    os.environ.update(parent_variable())
    ending = run(options)
    with os.fdopen(answer, "w") as stdout:
        print(json.dumps(ending.to_json()), file=stdout)
    return 0 if ending == Ending() else 1


def _allow_files() -> None:
    """A rank has connections to many others: as many open files as may be, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def run(options: argparse.Namespace) -> Ending:
    """Start the workers, wait for them, and tell how they ended."""
    with _silent_native_code():
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing import SubprocessContext
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    logging.disable(logging.CRITICAL)  # it tells of failures at length; the launcher does it in a line
    ended = _shorten_shutdown(SubprocessContext)
    with tempfile.TemporaryDirectory(prefix="fortyfold-torchrun-") as errors:
        try:
            chosen = _signals(torchrun.get_args_parser().format_help())
            torchrun.run(torchrun.parse_args([*chosen, *_torchrun_arguments(options, errors)]))
        except ChildFailedError as error:
            failures = [_tell(rank, failure, ended) for rank, failure in sorted(error.failures.items())]
            return Ending(tuple(failures))
        except Exception as error:
            return Ending(trouble=one_line(f"{type(error).__name__}: {error}"), port_taken="EADDRINUSE" in str(error))
    return Ending()


def _shorten_shutdown(context_class: "type[SubprocessContext]") -> set[int]:
    """Bound how long torchrun waits for workers that it ends; gives a set that will hold their process ids."""
    ended: set[int] = set()
    close = context_class.close

    def close_soon(
        context: "SubprocessContext", death_sig: signal.Signals | None = None, timeout: int = SHUTDOWN_SECONDS
    ) -> None:
        processes = [handler.proc for handler in context.subprocess_handlers.values()]
        ended.update(process.pid for process in processes if process.poll() is None)
        close(context, death_sig, min(timeout, SHUTDOWN_SECONDS))

    context_class.close = close_soon  # type: ignore[method-assign, assignment]
    return ended


def _tell(rank: int, failure: "ProcessFailure", ended: set[int]) -> Failure:
    """A worker's own words if it left any, else what its exit code says."""
    code, data = failure.exitcode, failure.error_file_data
    facts: dict[str, Any] = {"rank": rank, "process": failure.pid, "exit_code": code}
    if OURS in data:
        return Failure.from_json(data[OURS] | facts)
    facts["time"] = float(failure.timestamp)
    if isinstance(data["message"], dict):  # torchelastic's own layout
        text, extra = data["message"]["message"], data["message"].get("extraInfo", {})
        return Failure(kind="exception", message=one_line(text), traceback=extra.get("py_callstack", ""), **facts)
    if failure.pid in ended:
        return Failure(kind="ended", message="ended since another rank had failed", **facts)
    if code < 0:
        return Failure(kind="killed", message=f"was killed by {signal_name(-code)}", **facts)
    return Failure(kind="gone", message=f"ended with exit code {code} and without a word", **facts)


def _signals(torchrun_help: str) -> list[str]:
    """Older torch has no choice, and ends its workers at once on the usual signals, too."""
    return [f"--signals-to-handle={END.name}"] if "--signals-to-handle" in torchrun_help else []


def _torchrun_arguments(options: argparse.Namespace, errors: str) -> list[str]:
    return [
        "--rdzv-backend=static",
        f"--nnodes={options.nnodes}",
        f"--node-rank={options.node_rank}",
        f"--nproc-per-node={options.procs}",
        f"--master-addr={options.master_addr}",
        f"--master-port={options.master_port}",
        "--max-restarts=0",
        f"--monitor-interval={MONITOR_SECONDS}",
        f"--log-dir={errors}",
        "--module",
        options.module,
    ]


@contextmanager
def _silent_native_code() -> "Iterator[None]":
    """torch's native code reads its log level once, when it is imported; workers get the user's."""
    name = "TORCH_CPP_LOG_LEVEL"
    chosen = name in os.environ
    os.environ.setdefault(name, "FATAL")
    yield
    if not chosen:
        del os.environ[name]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fortyfold.parallel.torchrun")
    parser.add_argument("--procs", type=int, required=True, help="workers on this node")
    parser.add_argument("--module", required=True, help="what each worker runs, as python -m does")
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--master-port", type=int, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
