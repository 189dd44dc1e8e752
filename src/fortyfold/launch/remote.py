"""Programs on other hosts by ssh: a bash that reads its script from stdin, so that nothing is quoted twice.

Host keys are checked, nobody is asked for anything, and a host that is silent for a minute is given up. What follows
the script on stdin is the program's own; when it closes, the program is to end (launch/wire.py).
"""

import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from fortyfold.spec.errors import UserError
from fortyfold.spec.site import RemoteSite

_OPTIONS = (
    "BatchMode=yes", "StrictHostKeyChecking=yes", "ConnectTimeout=20", "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
)  # fmt: skip
UNREACHABLE = 255  # ssh's own exit code

Process = subprocess.Popen[bytes]
Say = Callable[[str], object]
Attend = Callable[[], None]


class Stopped(Exception):
    """Asked to stop before training began."""


def ssh_command(site: RemoteSite, host: str, *command: str, terminal: bool = False) -> list[str]:
    options = [part for option in _OPTIONS for part in ("-o", option)]
    config = ["-F", str(Path(site.config).expanduser())] if site.config else []
    return ["ssh", "-t" if terminal else "-T", *config, *options, "--", host, *command]


def shell_command(site: RemoteSite, host: str, inside: str) -> list[str]:
    """A shell there, at this terminal; `inside` as for Launcher.shell."""
    return ssh_command(site, host, *([f"bash -c {shlex.quote(inside)}"] if inside else []), terminal=True)


def start(
    site: RemoteSite, host: str, script: str, arguments: Sequence[int] = (), stderr: IO[Any] | int | None = None
) -> Process:
    """The script on that host; its stdin stays open."""
    numbers = ["--", *map(str, arguments)] if arguments else []
    try:
        process = subprocess.Popen(
            ssh_command(site, host, "bash", "-s", *numbers),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        raise UserError("there is no ssh on this machine; install it (openssh-client)") from None
    write(process, script.encode())
    return process


def write(process: Process, data: bytes) -> bool:
    """Whether it still listens."""
    assert process.stdin is not None
    try:
        process.stdin.write(data)
        process.stdin.flush()
    except (BrokenPipeError, ValueError):
        return False
    return True


def run(site: RemoteSite, host: str, script: str, data: bytes = b"") -> bytes:
    """What the script prints there, given `data` on stdin. A UserError says what went wrong, and where."""
    with start(site, host, script, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(data)
    if process.returncode:
        raise UserError(f"host {host}: {complaint(process.returncode, err)}")
    return out


def require_success(process: Process, host: str) -> None:
    """Wait for it; a UserError says what it said on stderr."""
    assert process.stderr is not None
    said = process.stderr.read()
    if code := process.wait():
        raise UserError(f"host {host}: {complaint(code, said)}")


def attended(works: Sequence[Callable[[], object]], attend: Attend) -> None:
    """All at once, in threads that nobody waits for when `attend` raises: they end with their connections."""
    failures: list[Exception] = []

    def attempt(work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=attempt, args=(work,), name="remote", daemon=True) for work in works]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not failures:
        attend()
        time.sleep(0.1)
    if failures:
        raise failures[0]


def on_all_hosts(hosts: Sequence[str], work: Callable[[str], object], attend: Attend) -> None:
    attended([partial(work, host) for host in hosts], attend)


def complaint(code: int, said: bytes) -> str:
    """The last line of what was said, or the exit code."""
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    what = lines[-1].removeprefix("fortyfold: ") if lines else f"exit code {code}"
    if code == UNREACHABLE and "verification failed" in what:
        return f"{what} its key is not known; connect once by hand, and see that it is the right one"
    return what
