"""A job that this command waits for, and asking a run to stop."""

import shutil
import signal
import subprocess
from collections.abc import Sequence

from fortyfold.launch.run_command import no_tool
from fortyfold.spec.errors import RunFailed
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag, write_request

POLL_SECONDS = 0.2


def run_in_foreground(
    command: Sequence[str], run_dir: RunDir, stop: StopFlag, terminal: int = subprocess.DEVNULL
) -> int:
    """Until it ends; gives its exit code. In a session of its own: a signal to this command asks the run to save."""
    asked = False
    if shutil.which(command[0]) is None:
        raise no_tool(command[0])
    with subprocess.Popen(command, stdin=terminal, start_new_session=True) as process:
        while process.poll() is None:
            try:
                process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                if stop.requested and not asked:
                    asked = True
                    write_request(run_dir, stop)
                    if not run_dir.is_locked():  # nothing has begun that would save
                        process.terminate()
    if not run_dir.ended.exists() and not stop.requested:
        raise RunFailed(f"{command[0]} ended with exit code {process.returncode} before the run began{_said(run_dir)}")
    return process.returncode


def _said(run_dir: RunDir) -> str:
    """The last line of the newest log."""
    logs = sorted(run_dir.logs.glob("job-*.log"), key=lambda log: log.stat().st_mtime)
    lines = logs[-1].read_text(encoding="utf-8", errors="replace").split("\n") if logs else []
    said = [line.strip() for line in lines if line.strip()]
    return f": {said[-1]} (more is in {logs[-1]})" if said else ""


def ask_to_stop(run_dir: RunDir) -> None:
    """Of a run whose directory is here: its ranks look for the request once a second."""
    asked = StopFlag()
    asked.ask(signal.SIGINT)
    write_request(run_dir, asked)
