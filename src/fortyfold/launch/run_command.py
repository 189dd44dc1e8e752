"""Running a scheduler's command: argv lists only, and a failure is one line."""

import shlex
import subprocess
from collections.abc import Mapping, Sequence

from fortyfold.spec.errors import UserError

PATIENCE_SECONDS = 120.0


def run_command(command: Sequence[str], environment: Mapping[str, str] | None = None, *, text: str = "") -> str:
    """What it prints. A UserError says what it said, or that it is not there."""
    try:
        done = subprocess.run(
            list(command), env=environment, input=text, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )
    except FileNotFoundError:
        raise no_tool(command[0]) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} has not answered for {PATIENCE_SECONDS:.0f} s; try again") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise UserError(f"{shlex.join(command[:2])} failed: {said}")
    return done.stdout


def no_tool(name: str) -> UserError:
    return UserError(f"there is no {name} on this machine; give the command where the cluster's are")
