"""Ends what was made for runs, found by its tags: instances, their disks and their security groups. Data stays."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fortyfold.launch.aws.instances import end_instances
from fortyfold.launch.aws.session import AwsError, Client
from fortyfold.launch.aws.tags import RUN, having, read_tags

POLL_SECONDS = 5.0
GROUP_SECONDS = 120.0  # an instance's network interface outlives it by a little
_ALIVE = ["pending", "running", "stopping", "stopped"]
_ENDING = "shutting-down"


@dataclass(frozen=True)
class Left:
    """What there is, by id, with the run that it was made for."""

    instances: dict[str, str]
    ending: dict[str, str]
    groups: dict[str, str]
    disks: dict[str, str]

    def lines(self) -> list[str]:
        named = {"instance": self.instances, "security group": self.groups, "disk": self.disks}
        return [f"{what} {id_} of {run}" for what, found in named.items() for id_, run in found.items()]


def find_left(ec2: Client, tags: Mapping[str, str]) -> Left:
    """What has these tags, and was made for a run."""
    wanted = _wanted(tags)
    states = [*wanted, {"Name": "instance-state-name", "Values": [*_ALIVE, _ENDING]}]
    found = ec2.list("describe_instances", "Reservations", Filters=states)
    instances = [each for one in found for each in one["Instances"]]
    groups = ec2.list("describe_security_groups", "SecurityGroups", Filters=wanted)
    return Left(
        {each["InstanceId"]: read_tags(each)[RUN] for each in instances if each["State"]["Name"] != _ENDING},
        {each["InstanceId"]: read_tags(each)[RUN] for each in instances if each["State"]["Name"] == _ENDING},
        {group["GroupId"]: read_tags(group)[RUN] for group in groups},
        _find_disks(ec2, tags),
    )


def reap(ec2: Client, tags: Mapping[str, str]) -> list[str]:
    """End it all; gives what it was, a line each. Again and again does no harm."""
    left = find_left(ec2, tags)
    end_instances(ec2, [*left.instances, *left.ending])
    for group in left.groups:
        _delete_group(ec2, group)
    for disk in _find_disks(ec2, tags):  # those that an instance left behind, too
        ec2("delete_volume", VolumeId=disk)
    return left.lines()


def _wanted(tags: Mapping[str, str]) -> list[dict[str, Any]]:
    return [*having(tags), {"Name": "tag-key", "Values": [RUN]}]


def _find_disks(ec2: Client, tags: Mapping[str, str]) -> dict[str, str]:
    free = [*_wanted(tags), {"Name": "status", "Values": ["available"]}]
    found = ec2.list("describe_volumes", "Volumes", Filters=free)
    return {disk["VolumeId"]: read_tags(disk)[RUN] for disk in found}


def _delete_group(ec2: Client, group: str) -> None:
    deadline = time.monotonic() + GROUP_SECONDS
    while True:
        try:
            ec2("delete_security_group", GroupId=group)
            return
        except AwsError as error:
            if error.code == "InvalidGroup.NotFound":
                return
            if error.code != "DependencyViolation" or time.monotonic() > deadline:
                raise
        time.sleep(POLL_SECONDS)
