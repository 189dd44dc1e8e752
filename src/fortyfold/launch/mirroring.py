"""The run directory of hosts that share no disk, brought here and back (launch/mirror.py does the copying)."""

import json
import secrets
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import BinaryIO, cast

from fortyfold.launch import remote
from fortyfold.launch.contract import Say
from fortyfold.launch.mirror import Part, State, read_changes, read_state, send
from fortyfold.launch.plan import Plan
from fortyfold.launch.script import environment_lines, in_container, quote, quote_path
from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.site import RemoteSite

PAUSE_SECONDS = 5.0


def _script(plan: Plan, *arguments: str, module: str = "mirror") -> str:
    command = f"{quote_path(plan.python)} -m fortyfold.launch.{module} {' '.join(arguments)}"
    return "\n".join([*environment_lines(plan.site), *in_container(plan, command)]) + "\n"


def _site(plan: Plan) -> RemoteSite:
    assert isinstance(plan.site, RemoteSite)
    return plan.site


def _part(node: int, *, checkpoints: bool) -> Part:
    """Of what a node has: the first has the run, the others their ranks' records."""
    return "records" if node else "all" if checkpoints else "no-checkpoints"


def _sending(plan: Plan, node: int, *options: str, checkpoints: bool) -> str:
    part = _part(node, checkpoints=checkpoints)
    return _script(plan, "send", quote_path(str(plan.run)), "--only", part, *options)


def settle(plan: Plan, hosts: Sequence[str], run_dir: RunDir, attend: remote.Attend, say: Say) -> None:
    """Before a start: the hosts and this machine agree on how far the run is. The later attempt's word holds, every
    record and the newest checkpoint."""
    remote.attended([partial(_settle, plan, hosts, run_dir, say)], attend)


def _settle(plan: Plan, hosts: Sequence[str], run_dir: RunDir, say: Say) -> None:
    for node, host in enumerate(hosts if plan.store else ()):
        remote.run(_site(plan), host, _at_store(plan, "fetch", "--only", _part(node, checkpoints=True)))
    there, here = _ask_state(plan, hosts[0]), read_state(run_dir)
    where = plan.store or f"{plan.run} on {hosts[0]}"
    if there.id and not here.id:
        say(f"note: this is the run that there is in {where}; --fresh sets it aside, --out gives another name")
    if there.id and here.id and there.id != here.id:
        raise UserError(
            f"{where} is another run than {run_dir.path}; --fresh sets both aside, --out gives another name"
        )
    if there.attempt >= here.attempt:
        fetch(plan, hosts, run_dir, checkpoints=not plan.site.keeps_runs)
    is_newer = here.attempt > there.attempt or here.newest > there.newest
    for node, host in enumerate(hosts):
        _push(plan, host, run_dir, "all" if is_newer and node == 0 else "records")


def _ask_state(plan: Plan, host: str, mark: str = "") -> State:
    options = ["--mark", mark] if mark else []
    said = remote.run(_site(plan), host, _script(plan, "state", quote_path(str(plan.run)), *options))
    return State(**json.loads(said.splitlines()[-1]))  # a shell's greeting may be first


def require_apart(plan: Plan, host: str, run_dir: RunDir) -> None:
    """A UserError if the folder there is the one here: a copy onto itself would destroy it."""
    mark = run_dir.launch / f"seen-{secrets.token_hex(8)}"
    mark.touch()
    try:
        if _ask_state(plan, host, mark.name).sees:
            raise UserError(f"{run_dir.path} is {plan.run} on {host}, too; write shared = true in the site")
    finally:
        mark.unlink()


def _at_store(plan: Plan, verb: str, *options: str) -> str:
    """What a host does with the run's copy on S3."""
    assert isinstance(plan.site, AwsSite) and plan.store is not None
    words = (quote_path(str(plan.run)), quote(plan.store), quote(plan.site.region), *options)
    return _script(plan, verb, *words, module="aws.store")


def set_aside(plan: Plan, hosts: Sequence[str]) -> None:
    """For --fresh: what the hosts, or S3, have of the run goes out of the way."""
    for host in hosts:
        remote.run(_site(plan), host, _script(plan, "set-aside", quote_path(str(plan.run))))
    if plan.store:
        remote.run(_site(plan), hosts[0], _at_store(plan, "set-aside"))


def fetch(plan: Plan, hosts: Sequence[str], run_dir: RunDir, *, checkpoints: bool) -> None:
    """What the hosts have now."""
    for node, host in enumerate(hosts):
        script = _sending(plan, node, "--once", checkpoints=checkpoints)
        with remote.start(_site(plan), host, script, stderr=subprocess.PIPE) as process:
            for _ in read_changes(run_dir, cast(BinaryIO, process.stdout)):
                pass
            remote.require_success(process, host)


def _push(plan: Plan, host: str, run_dir: RunDir, part: Part) -> None:
    script = _script(plan, "receive", quote_path(str(plan.run)))
    with remote.start(_site(plan), host, script, stderr=subprocess.PIPE) as process:
        with suppress(BrokenPipeError):
            send(run_dir, cast(BinaryIO, process.stdin), part, once=True)
            cast(BinaryIO, process.stdin).close()
        remote.require_success(process, host)


@contextmanager
def mirrored(plan: Plan, hosts: Sequence[str], run_dir: RunDir, say: Say) -> Iterator[None]:
    """Inside, what the hosts write comes here as it is written; checkpoints only if nothing else outlives the hosts."""
    if not plan.apart:
        yield
        return
    over, mirrors = threading.Event(), [_Mirror(plan, node, host, run_dir, say) for node, host in enumerate(hosts)]
    threads = [threading.Thread(target=mirror.keep, args=(over,), name="mirror", daemon=True) for mirror in mirrors]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for mirror, thread in zip(mirrors, threads, strict=True):
            while thread.is_alive():  # it may be about to begin anew
                mirror.end()
                thread.join(0.1)


class _Mirror:
    """What one host writes. When its connection breaks there will be another."""

    def __init__(self, plan: Plan, node: int, host: str, run_dir: RunDir, say: Say) -> None:
        self._plan, self._node, self._host, self._run_dir, self._say = plan, node, host, run_dir, say
        self._process: remote.Process | None = None

    def keep(self, over: threading.Event) -> None:
        why = self._receive()
        if not over.wait(PAUSE_SECONDS):
            self._say(f"note: the copy of what {self._host} writes is interrupted ({why}); it is tried again")
            while not over.wait(PAUSE_SECONDS):
                self._receive()

    def _receive(self) -> str:
        """Until there is no more; gives the reason."""
        script = _sending(self._plan, self._node, checkpoints=not self._plan.site.keeps_runs)
        try:
            with remote.start(_site(self._plan), self._host, script, stderr=subprocess.DEVNULL) as self._process:
                try:
                    for _ in read_changes(self._run_dir, cast(BinaryIO, self._process.stdout)):
                        pass
                finally:
                    self._process.kill()
            return "the connection ended"
        except (UserError, RunFailed, ValueError, OSError) as error:
            return str(error)

    def end(self) -> None:
        """What is being received ends."""
        if self._process is not None:
            self._process.kill()
