"""A list of hosts by ssh: this command starts an agent on each, looks after them, and starts them again."""

import shlex

from fortyfold.launch import remote
from fortyfold.launch.bootstrap import bootstrap
from fortyfold.launch.contract import Job, Rendered, Say
from fortyfold.launch.mirroring import settle
from fortyfold.launch.over_ssh import bootstrapped, cancel, note_job, start_once, start_until_over, state
from fortyfold.launch.plan import Plan
from fortyfold.launch.script import render_node
from fortyfold.spec.errors import UserError
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
    for host in hosts:
        bootstrap(_site(plan), host, say)
    note_job(plan, hosts, run_dir)
    if plan.apart:
        settle(plan, hosts, run_dir)
    return start_until_over(lambda: start_once(plan, rendered, hosts, run_dir, stop, say), run_dir, stop, say)


def shell(job: Job, node: int) -> list[str]:
    from fortyfold.spec.site_file import load_site

    site = load_site(job.site_name)
    assert isinstance(site, SshSite)
    if node >= len(job.hosts):
        raise UserError(f"there is no node {node}; it runs on {shlex.join(job.hosts)}")
    return remote.ssh_command(site, job.hosts[node], terminal=True)
