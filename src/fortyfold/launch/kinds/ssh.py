"""A list of hosts by ssh: this command starts an agent on each, looks after them, and starts them again."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from fortyfold.launch import remote
from fortyfold.launch.bootstrap import bootstrap
from fortyfold.launch.contract import Job, Rendered, Say
from fortyfold.launch.mirroring import require_apart, set_aside, settle
from fortyfold.launch.over_ssh import bootstrapped, cancel, looking_after, start_once, start_until_over, state
from fortyfold.launch.plan import Plan
from fortyfold.launch.script import quote_path, render_node
from fortyfold.spec.errors import UserError
from fortyfold.spec.exit_codes import STOPPED
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.site import SshSite
from fortyfold.spec.stop import StopFlag

BATCH = False
__all__ = ["BATCH", "cancel", "render", "run", "shell", "state", "submit"]


def render(plan: Plan, interactive: bool) -> Rendered:
    plan = bootstrapped(plan)
    site, hosts = _site(plan), _hosts(plan)
    commands = [
        remote.ssh_command(site, host, "bash", "-s", "--", "0", str(node), str(len(hosts)))
        for node, host in enumerate(hosts)
    ]
    return Rendered({RunDir(plan.run).node_script: render_node(plan)}, commands)


def _site(plan: Plan) -> SshSite:
    assert isinstance(plan.site, SshSite)
    return plan.site


def _hosts(plan: Plan) -> tuple[str, ...]:
    hosts = _site(plan).hosts[: len(plan.shapes)]
    if len(hosts) < len(plan.shapes):
        raise UserError(f"site {plan.site_name} has {len(hosts)} hosts, and {len(plan.shapes)} nodes were asked for")
    return hosts


def submit(plan: Plan, rendered: Rendered) -> Job:
    raise AssertionError("BATCH is False")


def run(plan: Plan, rendered: Rendered, run_dir: RunDir, stop: StopFlag, say: Say) -> int:
    plan, hosts = bootstrapped(plan), _hosts(plan)

    def attend() -> None:
        if stop.requested:
            raise remote.Stopped

    try:
        with looking_after(plan, hosts, run_dir), _checked(plan, hosts):
            remote.on_all_hosts(hosts, lambda host: bootstrap(_site(plan), host, say), attend)
            if plan.apart:
                require_apart(plan, hosts[0], run_dir)
                if plan.fresh:
                    set_aside(plan, hosts)
                settle(plan, hosts, run_dir, attend, say)
            return start_until_over(lambda: start_once(plan, rendered, hosts, run_dir, stop, say), run_dir, stop, say)
    except remote.Stopped:
        return STOPPED


@contextmanager
def _checked(plan: Plan, hosts: Sequence[str]) -> Iterator[None]:
    """A check leaves nothing on the hosts."""
    try:
        yield
    finally:
        for host in hosts if plan.checks and plan.apart else ():
            with suppress(UserError):
                remote.run(_site(plan), host, f"rm -rf -- {quote_path(str(plan.run))}\n")


def shell(job: Job, node: int, inside: str) -> list[str]:
    from fortyfold.spec.site_file import load_site

    site = load_site(job.site_name)
    assert isinstance(site, SshSite)
    if node >= len(job.hosts):
        raise UserError(f"there is no node {node}; it runs on {shlex.join(job.hosts)}")
    return remote.shell_command(site, job.hosts[node], inside)
