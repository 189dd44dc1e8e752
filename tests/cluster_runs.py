"""What the tests on clusters share: a run that takes a while, and commands in processes of their own."""

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from fortyfold.spec.events import Event, read_events
from fortyfold.spec.run_dir import RunDir

PATIENCE_SECONDS = 400.0
# Some 7 s of training, so that there is time to disturb it.
LONG = ("--epochs", "20", "--set", "global_batch=16", "--set", "evaluate.every_epochs=20")
LONG_SAVES = ("--set", "checkpoint.every_epochs=0", "--set", "checkpoint.every_minutes=0")  # only when it is stopped


def wait_until(holds: Callable[[], object], what: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def events_of(run_dir: RunDir, kind: str, rank: int = 0) -> list[Event]:
    return [event for event in read_events(run_dir.events(rank)) if event["kind"] == kind]


def takes_steps(run_dir: RunDir, attempt: int = 1) -> bool:
    """Whether that attempt has trained for a moment."""
    started = [event for event in events_of(run_dir, "started") if event["attempt"] >= attempt]
    steps = run_dir.steps()
    return bool(started) and steps.exists() and time.time() - started[0]["time"] > 2 and steps.stat().st_size > 500


def call(folder: Path, environment: Mapping[str, str], *arguments: object) -> tuple[int, str, str]:
    """A command line in a process of its own, in that folder."""
    command = [sys.executable, "-m", "fortyfold", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    return done.returncode, done.stdout, done.stderr


def at_terminal(start: Callable[[int], "subprocess.Popen[str]"], typed: str) -> str:
    """What a program shows at a terminal where that line is typed; it must end well."""
    ours, theirs = pty.openpty()
    process = start(theirs)
    os.close(theirs)
    os.write(ours, f"{typed}\n".encode())
    said = b""
    with suppress(OSError):  # the other side has closed
        while block := os.read(ours, 1000):
            said += block
    os.close(ours)
    assert process.wait(60) == 0, said
    return said.decode()
