"""The run directory of hosts that share no disk, brought here and back (launch/mirror.py does the copying)."""

import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO, cast

from fortyfold.launch import remote
from fortyfold.launch.mirror import read_changes, send
from fortyfold.launch.plan import Plan
from fortyfold.launch.script import environment_lines, in_container, quote_path
from fortyfold.spec.errors import RunFailed
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.site import RemoteSite


def _script(plan: Plan, *arguments: str) -> str:
    command = f"{quote_path(plan.python)} -m fortyfold.launch.mirror {' '.join(arguments)}"
    return "\n".join([*environment_lines(plan.site), *in_container(plan, command)]) + "\n"


def _site(plan: Plan) -> RemoteSite:
    assert isinstance(plan.site, RemoteSite)
    return plan.site


def _sending(plan: Plan, node: int, *options: str) -> str:
    return _script(plan, "send", quote_path(str(plan.run)), *(["--ranks"] if node else []), *options)


def settle(plan: Plan, hosts: Sequence[str], run_dir: RunDir) -> None:
    """Before a start: the hosts and this machine agree on how far the run is. The later attempt's word holds."""
    site, path = _site(plan), quote_path(str(plan.run))
    there = int(remote.run(site, hosts[0], _script(plan, "attempt", path)))
    if there >= (run_dir.read_attempt() or 0):
        fetch(plan, hosts, run_dir)
    else:
        _push(plan, hosts[0], run_dir, ranks_only=False)
    for host in hosts[1:]:
        _push(plan, host, run_dir, ranks_only=True)


def fetch(plan: Plan, hosts: Sequence[str], run_dir: RunDir) -> None:
    """What the hosts have now. The first has the run, the others their ranks' records."""
    for node, host in enumerate(hosts):
        with remote.start(_site(plan), host, _sending(plan, node, "--once"), stderr=subprocess.PIPE) as process:
            for _ in read_changes(run_dir, cast(BinaryIO, process.stdout)):
                pass
            remote.require_success(process, host)


def _push(plan: Plan, host: str, run_dir: RunDir, *, ranks_only: bool) -> None:
    script = _script(plan, "receive", quote_path(str(plan.run)))
    with remote.start(_site(plan), host, script, stderr=subprocess.PIPE) as process:
        with suppress(BrokenPipeError):
            send(run_dir, cast(BinaryIO, process.stdin), once=True, ranks_only=ranks_only)
            cast(BinaryIO, process.stdin).close()
        remote.require_success(process, host)


@contextmanager
def mirrored(plan: Plan, hosts: Sequence[str], run_dir: RunDir) -> Iterator[None]:
    """Inside, what the hosts write comes here as it is written."""
    processes: list[remote.Process] = []
    if plan.apart:
        for node, host in enumerate(hosts):
            process = remote.start(_site(plan), host, _sending(plan, node), stderr=subprocess.DEVNULL)
            processes.append(process)
            threading.Thread(target=_receive, args=(process, run_dir), name="mirror", daemon=True).start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _receive(process: remote.Process, run_dir: RunDir) -> None:
    with suppress(RunFailed, ValueError, OSError):  # its host is gone; the agent's line tells of it
        for _ in read_changes(run_dir, cast(BinaryIO, process.stdout)):
            pass
