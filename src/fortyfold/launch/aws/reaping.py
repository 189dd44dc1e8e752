"""Ends what was made for runs, found by its tags: instances, their disks and their security groups. Data stays."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from fortyfold.launch.aws.instances import end_instances
from fortyfold.launch.aws.session import AwsError, Ec2
from fortyfold.launch.aws.tags import RUN, having, read_tags

POLL_SECONDS = 5.0
GROUP_SECONDS = 120.0  # an instance's network interface outlives it by a little
_ALIVE = ["pending", "running", "stopping", "stopped"]
_ENDING = ["shutting-down"]


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


def find_left(ec2: Ec2, tags: Mapping[str, str]) -> Left:
    """What has these tags, and was made for a run."""
    wanted = [*having(tags), {"Name": "tag-key", "Values": [RUN]}]

    def instances(states: list[str]) -> dict[str, str]:
        filters = [*wanted, {"Name": "instance-state-name", "Values": states}]
        found = ec2.list("describe_instances", "Reservations", Filters=filters)
        return {each["InstanceId"]: read_tags(each)[RUN] for one in found for each in one["Instances"]}

    groups = ec2.list("describe_security_groups", "SecurityGroups", Filters=wanted)
    disks = ec2.list("describe_volumes", "Volumes", Filters=[*wanted, {"Name": "status", "Values": ["available"]}])
    return Left(
        instances(_ALIVE),
        instances(_ENDING),
        {group["GroupId"]: read_tags(group)[RUN] for group in groups},
        {disk["VolumeId"]: read_tags(disk)[RUN] for disk in disks},
    )


def reap(ec2: Ec2, tags: Mapping[str, str]) -> list[str]:
    """End it all; gives what it was, a line each. Again and again does no harm."""
    left = find_left(ec2, tags)
    end_instances(ec2, [*left.instances, *left.ending])
    for group in left.groups:
        _delete_group(ec2, group)
    for disk in find_left(ec2, tags).disks:  # those that an instance left behind
        ec2("delete_volume", VolumeId=disk)
    return left.lines()


def _delete_group(ec2: Ec2, group: str) -> None:
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
