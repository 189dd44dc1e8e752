"""Runs a recipe's sinks beside training: each is `fortyfold sink RUN NAME --follow` in a process of its own.

They start when an attempt has begun, at low priority and in a session of their own, so that a Ctrl-C for training is
none for them. One that fails is a line on the terminal, and no more. At the end they get a bounded time to finish.
"""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from fortyfold.spec.beside import beside
from fortyfold.spec.events import last_attempt, read_events
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag

POLL_SECONDS = 0.5
TELL_SECONDS = 3.0
PATIENCE_SECONDS = 60.0
HURRIED_SECONDS = 5.0  # after a signal: whoever sent it may not wait long
NICENESS = 10

Processes = dict[str, "subprocess.Popen[bytes]"]


@contextmanager
def attached(run_dir: RunDir, names: Sequence[str], stop: StopFlag) -> Iterator[None]:
    """Start the sinks `names` once training inside the context has begun, and wait for them at its end."""
    if not names:
        yield
        return
    before = _attempt(run_dir)

    def attend(over: threading.Event) -> None:
        while _attempt(run_dir) == before:
            if over.wait(POLL_SECONDS) and _attempt(run_dir) == before:
                return  # nothing began
        processes = _start_all(run_dir, names)
        while processes and not over.wait(POLL_SECONDS):
            _reap(run_dir, processes)
        _wait(run_dir, processes, stop)

    with beside("sinks", attend):
        yield


def sink_command(run_dir: RunDir, name: str) -> list[str]:
    return [sys.executable, "-m", "fortyfold", "sink", str(run_dir.path), name, "--follow"]


def _attempt(run_dir: RunDir) -> int:
    return last_attempt(read_events(run_dir.events()))


def _start_all(run_dir: RunDir, names: Sequence[str]) -> Processes:
    processes = {}
    for name in dict.fromkeys(names):
        try:
            processes[name] = _start(run_dir, name)
        except OSError as error:
            _tell_failure(run_dir, name, f"cannot be started: {error}")
    return processes


def _start(run_dir: RunDir, name: str) -> "subprocess.Popen[bytes]":
    log = run_dir.sink_log(name)
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            sink_command(run_dir, name),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    with suppress(OSError):  # it may be over already
        os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    return process


def _reap(run_dir: RunDir, processes: Processes) -> None:
    """Forget those that ended, and tell of those that failed."""
    for name in [name for name, process in processes.items() if process.poll() is not None]:
        if code := processes.pop(name).returncode:
            _tell_failure(run_dir, name, f"failed: {_last_line(run_dir, name) or f'exit code {code}'}")


def _wait(run_dir: RunDir, processes: Processes, stop: StopFlag) -> None:
    started, told = time.monotonic(), False
    while True:
        _reap(run_dir, processes)
        waited = time.monotonic() - started
        if not processes or waited > (HURRIED_SECONDS if stop.requested else PATIENCE_SECONDS):
            break
        if waited > TELL_SECONDS and not told:
            told = True
            print(f"waiting for the sinks to finish: {', '.join(processes)}", flush=True)
        time.sleep(POLL_SECONDS / 5)
    for name, process in processes.items():
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _tell_failure(run_dir, name, f"did not finish in {waited:.0f} s and was ended")


def _last_line(run_dir: RunDir, name: str) -> str:
    try:
        lines = run_dir.sink_log(name).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return str(error)
    told = [line for line in lines if line.startswith("fortyfold: ")] or [line for line in lines if line.strip()]
    return told[-1].removeprefix("fortyfold: ") if told else ""


def _tell_failure(run_dir: RunDir, name: str, what: str) -> None:
    afterwards = shlex.join(["fortyfold", "sink", str(run_dir.path), name])
    print(f"note: the sink {name} {what} (training does not mind; to do it afterwards: {afterwards})", flush=True)
