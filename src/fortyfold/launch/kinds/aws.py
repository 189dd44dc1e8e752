"""Instances of EC2, made for the run: all together in one zone, reached by ssh, and ended whatever happens.

This command looks after them. When a spot instance is to be taken away the run is saved, and a new gang goes on from
there; so it does when instances are lost. The run is kept here after every checkpoint, or on a disk that all see.
Everything is tagged with the run. What cannot be ended ends by itself: after a time without a connection, and at the
time limit (launch/aws/asking.py).
"""

import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from fortyfold.launch import remote
from fortyfold.launch.aws import instances
from fortyfold.launch.aws.asking import instances_request, user_data
from fortyfold.launch.aws.group import find_own_address, make_group
from fortyfold.launch.aws.host_key import HostKey, host_names, make_host_key, write_ssh_config
from fortyfold.launch.aws.lookup import Found, Image, look_up
from fortyfold.launch.aws.prepare import await_sshd, on_all_hosts, prepare_host
from fortyfold.launch.aws.reaping import reap
from fortyfold.launch.aws.session import Ec2, connect
from fortyfold.launch.aws.tags import RUN, run_tag, run_tags
from fortyfold.launch.aws.volumes import attach_volumes, await_available
from fortyfold.launch.contract import Job, Rendered, Say
from fortyfold.launch.kinds.ssh import bootstrapped, cancel, note_job, start_once, start_until_over, state
from fortyfold.launch.mirroring import settle
from fortyfold.launch.plan import Plan
from fortyfold.launch.script import render_node
from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.nodes import parse_seconds
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag

BATCH = False
FAILED, STOPPED = 1, 75
ROOM_SECONDS = 30.0  # between two questions whether there is room now
__all__ = ["BATCH", "cancel", "render", "run", "shell", "state", "submit"]


class _Stop(Exception):
    """Asked to stop before training began."""


def render(plan: Plan, interactive: bool) -> Rendered:
    """The request, with words in the place of what is known only when it is made."""
    plan, site = bootstrapped(plan), _site(plan)
    run_dir, num_nodes = RunDir(plan.run), len(plan.shapes)
    data = user_data(
        site, HostKey("(made for the run)", "(made for the run)"), _minutes(parse_seconds(site.time_limit))
    )
    image, tags = Image(site.ami, "", "(the image's own)"), {RUN: plan.name}
    request = instances_request(site, num_nodes, image, "(the first with room)", "(the run's own)", data, tags)
    files = {run_dir.node_script: render_node(plan), run_dir.instances: json.dumps(request, indent=2) + "\n"}
    hosts = host_names(num_nodes)
    there = site.model_copy(update={"config": str(run_dir.ssh_config)})
    agents = [
        remote.ssh_command(there, host, "bash", "-s", "--", "0", str(node), str(num_nodes))
        for node, host in enumerate(hosts)
    ]
    return Rendered(files, agents)


def _site(plan: Plan) -> AwsSite:
    assert isinstance(plan.site, AwsSite)
    return plan.site


def _minutes(seconds: float) -> int:
    """For shutdown; a little late, so that the launcher is first."""
    return max(1, math.ceil(seconds / 60)) + 2


def submit(plan: Plan, rendered: Rendered) -> Job:
    raise AssertionError("BATCH is False")


def run(plan: Plan, rendered: Rendered, run_dir: RunDir, stop: StopFlag, say: Say) -> int:
    plan = bootstrapped(plan)
    note_job(plan, host_names(len(plan.shapes)), run_dir)
    work = _Work(connect(_site(plan)), plan, rendered, run_dir, stop, say)
    with _warned(work), _nothing_left(work):
        reap(work.ec2, {RUN: work.tag})  # of a command that was killed
        return start_until_over(partial(_start, work), run_dir, stop, say)


@dataclass
class _Work:
    ec2: Ec2
    plan: Plan
    rendered: Rendered
    run_dir: RunDir
    stop: StopFlag
    say: Say
    group: str = ""
    num_starts: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def site(self) -> AwsSite:
        return _site(self.plan)

    @property
    def tag(self) -> str:
        return run_tag(self.run_dir)

    def seconds_left(self) -> float:
        return parse_seconds(self.site.time_limit) - (time.monotonic() - self.began)

    def attend(self) -> None:
        if self.stop.requested:
            raise _Stop


@contextmanager
def _warned(work: _Work) -> Iterator[None]:
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
def _nothing_left(work: _Work) -> Iterator[None]:
    try:
        yield
    finally:
        try:
            reap(work.ec2, {RUN: work.tag})
        except UserError as error:  # what went wrong before is the news
            hours = max(0.0, work.seconds_left()) / 3600
            work.say(f"note: not all could be ended ({error}); `fortyfold aws reap {work.plan.site_name}` does it")
            work.say(f"note: instances end by themselves, in {hours:.1f} h at the latest")


def _start(work: _Work) -> tuple[str, int]:
    """A gang, from its making to its end; gives the run's last word and the exit code."""
    work.num_starts += 1
    try:
        with _gang(work) as (plan, hosts):
            return start_once(plan, work.rendered, hosts, work.run_dir, work.stop, work.say)
    except _Stop:
        return work.stop.reason, STOPPED
    except instances.InstancesLost as error:
        work.say(f"note: {error}")
        return "lost", FAILED


@contextmanager
def _gang(work: _Work) -> Iterator[tuple[Plan, Sequence[str]]]:
    """Hosts that are ready for their agents, and how to reach them. When it is left they are ended."""
    work.attend()
    found, key = look_up(work.ec2, work.site, len(work.plan.shapes)), make_host_key()
    await_available(work.ec2, found.volumes, work.attend)
    work.group = work.group or make_group(work.ec2, work.tag, found.subnets[0].network, find_own_address(work.site))
    work.say(f"starting {len(work.plan.shapes)} instances of {work.site.instance_type}")
    ids = _start_when_there_is_room(work, found, key)
    plan, hosts = work.plan, host_names(len(ids))
    try:
        addresses = instances.await_running(work.ec2, ids, work.attend, private=work.site.private)
        config = write_ssh_config(work.run_dir, work.site, addresses, key)
        plan = replace(plan, site=work.site.model_copy(update={"config": str(config)}))
        with _losses_told(work, ids):
            _make_ready(work, plan, hosts, ids, found)
            yield plan, hosts
    finally:
        _end(work, plan, hosts, ids)


def _start_when_there_is_room(work: _Work, found: Found, key: HostKey) -> list[str]:
    """A run that has begun waits for it; a new one hears at once that there is none."""
    until = time.monotonic() + (work.site.wait_minutes * 60 if work.num_starts > 1 else 0)
    told = False
    while True:
        data = user_data(work.site, key, _minutes(work.seconds_left()))
        try:
            return instances.start_instances(
                work.ec2, work.site, found, len(work.plan.shapes), work.group, data, run_tags(work.tag)
            )
        except instances.NoRoom as error:
            if time.monotonic() >= until:
                raise
            if not told:
                work.say(f"note: {error}; asking again for {work.site.wait_minutes} minutes")
            told = True
        again = time.monotonic() + ROOM_SECONDS
        while time.monotonic() < again:
            work.attend()
            time.sleep(min(1.0, ROOM_SECONDS))


def _make_ready(work: _Work, plan: Plan, hosts: Sequence[str], ids: Sequence[str], found: Found) -> None:
    """Volumes, fortyfold, and the run as far as it is."""
    site = _site(plan)
    attach_volumes(work.ec2, found.volumes, ids)
    on_all_hosts(hosts, partial(await_sshd, site), work.attend)
    work.say("preparing the instances")
    volumes = dict(zip(hosts, found.volumes, strict=bool(found.volumes)))
    on_all_hosts(hosts, lambda host: prepare_host(site, host, volumes.get(host), work.say), work.attend)
    if plan.apart:
        settle(plan, hosts, work.run_dir)


@contextmanager
def _losses_told(work: _Work, ids: Sequence[str]) -> Iterator[None]:
    """What fails while instances are gone failed for that, and is no reason to give up: InstancesLost."""
    try:
        yield
    except (UserError, RunFailed) as error:
        if instances.are_running(work.ec2, ids):
            raise
        raise instances.InstancesLost(f"instances were lost: {error}") from None


def _end(work: _Work, plan: Plan, hosts: Sequence[str], ids: Sequence[str]) -> None:
    """By EC2's hand, or else (the credentials may have expired meanwhile) by their own."""
    work.say(f"ending {len(ids)} instances")
    try:
        instances.end_instances(work.ec2, ids)
    except UserError as error:
        work.say(f"note: {error}; shutting them down by ssh")
        for host in hosts:
            with suppress(UserError):
                remote.run(_site(plan), host, "sudo -n shutdown -h now\n")


def shell(job: Job, node: int) -> list[str]:
    from fortyfold.spec.site_file import load_site

    site = load_site(job.site_name)
    assert isinstance(site, AwsSite)
    if node >= len(job.hosts):
        raise UserError(f"there is no node {node}; it has {len(job.hosts)}")
    run_dir = RunDir(Path(job.log).parents[1])
    return remote.ssh_command(
        site.model_copy(update={"config": str(run_dir.ssh_config)}), job.hosts[node], terminal=True
    )
