"""Instances of EC2, made for the run: all together in one zone, reached by ssh, and ended whatever happens.

This command looks after them. When a spot instance is to be taken away the run is saved, and a new gang goes on from
there; so it does when instances are lost. The run is kept here after every checkpoint, or on S3 or EFS (run_root).
Everything is tagged with the run. What cannot be ended ends by itself: after a time without a connection, and at the
time limit (launch/aws/asking.py).
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from fortyfold.launch import remote
from fortyfold.launch.aws.asking import instances_request, user_data
from fortyfold.launch.aws.gang import Work, aws_site, gang, shutdown_minutes
from fortyfold.launch.aws.host_key import HostKey, host_names
from fortyfold.launch.aws.instances import InstancesLost
from fortyfold.launch.aws.lookup import Image
from fortyfold.launch.aws.reaping import reap
from fortyfold.launch.aws.session import connect
from fortyfold.launch.aws.tags import RUN
from fortyfold.launch.contract import Job, Rendered, Say
from fortyfold.launch.over_ssh import bootstrapped, cancel, looking_after, start_once, start_until_over, state
from fortyfold.launch.plan import Plan
from fortyfold.launch.script import render_node
from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import UserError
from fortyfold.spec.exit_codes import FAILED, STOPPED
from fortyfold.spec.nodes import parse_seconds
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag

BATCH = False
__all__ = ["BATCH", "cancel", "render", "run", "shell", "state", "submit"]


def render(plan: Plan, interactive: bool) -> Rendered:
    """The request, with words in the place of what is known only when it is made."""
    plan, site = bootstrapped(plan), aws_site(plan)
    run_dir, num_nodes = RunDir(plan.run), len(plan.shapes)
    key, minutes = HostKey("(made for the run)", "(made for the run)"), shutdown_minutes(parse_seconds(site.time_limit))
    data = user_data(site, key, minutes)
    image, tags = Image(site.ami, "", "(the image's own)"), {RUN: plan.name}
    request = instances_request(site, num_nodes, image, "(the first with room)", "(the run's own)", data, tags)
    files = {run_dir.node_script: render_node(plan), run_dir.instances: json.dumps(request, indent=2) + "\n"}
    hosts = host_names(num_nodes)
    here = RunDir(Path("runs", plan.name))  # where the command will write it, unless --out says otherwise
    there = site.model_copy(update={"config": str(here.ssh_config)})
    agents = [
        remote.ssh_command(there, host, "bash", "-s", "--", "0", str(node), str(num_nodes))
        for node, host in enumerate(hosts)
    ]
    return Rendered(files, agents)


def submit(plan: Plan, rendered: Rendered) -> Job:
    raise AssertionError("BATCH is False")


def run(plan: Plan, rendered: Rendered, run_dir: RunDir, stop: StopFlag, say: Say) -> int:
    plan = bootstrapped(plan)
    work = Work(connect(aws_site(plan)), plan, rendered, run_dir, stop, say)
    with looking_after(plan, host_names(len(plan.shapes)), run_dir), _warned(work), _nothing_left(work):
        reap(work.ec2, {RUN: work.tag})  # of a command that was killed
        return start_until_over(partial(_start, work), run_dir, stop, say)


@contextmanager
def _warned(work: Work) -> Iterator[None]:
    """The time limit is the whole command's, however many gangs it takes: shortly before, the run is saved."""
    seconds = max(0.0, work.seconds_left() - work.site.warn_seconds)
    timer = threading.Timer(seconds, work.stop.ask_by_name, ["SIGUSR1"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _nothing_left(work: Work) -> Iterator[None]:
    try:
        yield
    finally:
        try:
            reap(work.ec2, {RUN: work.tag})
        except UserError as error:  # what went wrong before is the news
            hours = shutdown_minutes(work.seconds_left()) / 60
            work.say(f"note: not all could be ended ({error}); `fortyfold aws reap {work.plan.site_name}` does it")
            work.say(f"note: instances end by themselves, in {hours:.1f} h at the latest")


def _start(work: Work) -> tuple[str, int]:
    """A gang, from its making to its end; gives the run's last word and the exit code."""
    work.num_starts += 1
    try:
        with gang(work) as (plan, hosts):
            return start_once(plan, work.rendered, hosts, work.run_dir, work.stop, work.say)
    except remote.Stopped:
        return work.stop.reason, STOPPED
    except InstancesLost as error:
        work.say(f"note: {error}")
        return "lost", FAILED


def shell(job: Job, node: int, inside: str) -> list[str]:
    from fortyfold.spec.site_file import load_site

    site = load_site(job.site_name)
    assert isinstance(site, AwsSite)
    if node >= len(job.hosts):
        raise UserError(f"there is no node {node}; it has {len(job.hosts)}")
    run_dir = RunDir(Path(job.log).parents[1])
    there = site.model_copy(update={"config": str(run_dir.ssh_config)})
    return remote.shell_command(there, job.hosts[node], inside)
