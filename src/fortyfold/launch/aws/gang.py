"""A gang: all instances of a start, from the question for them to their end.

What is done by ssh is in prepare.py, what EC2 is asked for in asking.py; here is the order, and who is told.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from fortyfold.launch import remote
from fortyfold.launch.aws import instances
from fortyfold.launch.aws.asking import user_data
from fortyfold.launch.aws.group import find_own_address, make_group
from fortyfold.launch.aws.host_key import HostKey, host_names, make_host_key, write_ssh_config
from fortyfold.launch.aws.lookup import Found, look_up
from fortyfold.launch.aws.prepare import await_sshd, prepare_host
from fortyfold.launch.aws.session import Client
from fortyfold.launch.aws.tags import run_tag, run_tags
from fortyfold.launch.aws.volumes import attach_volumes, await_available
from fortyfold.launch.contract import Rendered, Say
from fortyfold.launch.mirroring import set_aside, settle
from fortyfold.launch.plan import Plan
from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.nodes import parse_seconds
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag

GRACE_MINUTES = 10
ROOM_SECONDS = 30.0  # between two questions whether there is room now


@dataclass
class Work:
    """A command's: its run, and the gangs that it takes."""

    ec2: Client
    plan: Plan
    rendered: Rendered
    run_dir: RunDir
    stop: StopFlag
    say: Say
    group: str = ""
    num_starts: int = 0
    was_set_aside: bool = False
    """Whether what there was of the run before, if it is to begin anew."""
    began: float = field(default_factory=time.monotonic)

    @property
    def site(self) -> AwsSite:
        return aws_site(self.plan)

    @property
    def tag(self) -> str:
        return run_tag(self.run_dir)

    def seconds_left(self) -> float:
        return parse_seconds(self.site.time_limit) - (time.monotonic() - self.began)

    def attend(self) -> None:
        if self.stop.requested:
            raise remote.Stopped


def aws_site(plan: Plan) -> AwsSite:
    assert isinstance(plan.site, AwsSite)
    return plan.site


def shutdown_minutes(seconds: float) -> int:
    """For shutdown; so late that the launcher is first, and nobody may log in during the last five of them."""
    return max(0, math.ceil(seconds / 60)) + GRACE_MINUTES


@contextmanager
def gang(work: Work) -> Iterator[tuple[Plan, Sequence[str]]]:
    """Hosts that are ready for their agents, and how to reach them. When it is left they are ended."""
    work.attend()
    found, key = look_up(work.ec2, work.site, len(work.plan.shapes)), make_host_key()
    await_available(work.ec2, found.volumes, work.attend)
    work.group = work.group or make_group(work.ec2, work.tag, found.subnets[0].network, find_own_address(work.site))
    work.say(f"starting {len(work.plan.shapes)} instances of {work.site.instance_type}")
    ids = start_when_there_is_room(work, found, key)
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


def start_when_there_is_room(work: Work, found: Found, key: HostKey) -> list[str]:
    """A run that has begun waits for it; a new one hears at once that there is none."""
    until = time.monotonic() + (work.site.wait_minutes * 60 if work.num_starts > 1 else 0)
    told = False
    while True:
        data = user_data(work.site, key, shutdown_minutes(work.seconds_left()))
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


def _make_ready(work: Work, plan: Plan, hosts: Sequence[str], ids: Sequence[str], found: Found) -> None:
    """Volumes, fortyfold, and the run as far as it is."""
    site = aws_site(plan)
    attach_volumes(work.ec2, found.volumes, ids)
    remote.on_all_hosts(hosts, partial(await_sshd, site), work.attend)
    work.say("preparing the instances")
    volumes = dict(zip(hosts, found.volumes, strict=bool(found.volumes)))
    remote.on_all_hosts(hosts, lambda host: prepare_host(site, host, volumes.get(host), work.say), work.attend)
    if plan.apart:
        if plan.fresh and not work.was_set_aside:
            remote.attended([partial(set_aside, plan, hosts)], work.attend)
            work.was_set_aside = True
        settle(plan, hosts, work.run_dir, work.attend, work.say)


@contextmanager
def _losses_told(work: Work, ids: Sequence[str]) -> Iterator[None]:
    """What fails while instances are gone failed for that, and is no reason to give up: InstancesLost."""
    try:
        yield
    except (UserError, RunFailed) as error:
        if instances.are_running(work.ec2, ids):
            raise
        raise instances.InstancesLost(f"instances were lost: {error}") from None


def _end(work: Work, plan: Plan, hosts: Sequence[str], ids: Sequence[str]) -> None:
    """By EC2's hand, or else (the credentials may have expired meanwhile) by their own."""
    work.say(f"ending {len(ids)} instances")
    try:
        instances.end_instances(work.ec2, ids)
    except UserError as error:
        work.say(f"note: {error}; shutting them down by ssh")
        for host in hosts:
            with suppress(UserError):
                remote.run(aws_site(plan), host, "sudo -n shutdown -h now\n")
