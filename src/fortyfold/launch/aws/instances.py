"""The instances of a run: all of them or none, in the first zone that has room, and their end."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fortyfold.launch.aws.asking import instances_request
from fortyfold.launch.aws.lookup import Found
from fortyfold.launch.aws.session import AwsError, Client
from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import RunFailed, UserError

POLL_SECONDS = 5.0
START_SECONDS = 600.0
END_SECONDS = 900.0  # large machines take their time
# In another zone it may be otherwise. (Unsupported: that zone does not have the type at all.)
_FULL = (
    "InsufficientInstanceCapacity",
    "InsufficientHostCapacity",
    "InsufficientFreeAddressesInSubnet",
    "SpotMaxPriceTooLow",
    "Unsupported",
)

Attend = Callable[[], None]
"""Called while waiting; it may raise."""


class NoRoom(UserError):
    """No zone has room for all."""


class InstancesLost(RunFailed):
    """Some are gone, and it was not we who ended them."""


def start_instances(
    ec2: Client, site: AwsSite, found: Found, num_nodes: int, group: str, data: str, tags: Mapping[str, str]
) -> list[str]:
    """Their ids, node by node. The token makes a repeated request the same request."""
    refused = []
    for subnet in found.subnets:
        request = instances_request(site, num_nodes, found.image, subnet.id, group, data, tags)
        try:
            made = ec2("run_instances", ClientToken=uuid.uuid4().hex, **request)["Instances"]
        except AwsError as error:
            if error.code not in _FULL:
                raise
            refused.append(f"{subnet.zone}: {error.code}")
        else:
            return [each["InstanceId"] for each in sorted(made, key=lambda each: int(each["AmiLaunchIndex"]))]
    market = "spot " if site.spot else ""
    raise NoRoom(
        f"AWS: no room for {num_nodes} {market}instances of {site.instance_type} together ({', '.join(refused)}); "
        "try later, or another region or instance_type"
    )


def await_running(ec2: Client, ids: Sequence[str], attend: Attend, *, private: bool) -> list[str]:
    """Their addresses. Raises InstancesLost."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        attend()
        found = describe(ec2, ids)
        states = {name: each["State"]["Name"] for name, each in found.items()}
        if lost := [name for name in ids if states.get(name, "pending") not in ("pending", "running")]:
            raise InstancesLost(f"instance {lost[0]} ended at once: {_why(found[lost[0]])}")
        if all(states.get(name) == "running" for name in ids):
            return [_address(found[name], private) for name in ids]
        if time.monotonic() > deadline:
            raise UserError(f"AWS: after {START_SECONDS:.0f} s not all instances run; try again")
        time.sleep(POLL_SECONDS)


def are_running(ec2: Client, ids: Sequence[str]) -> bool:
    found = describe(ec2, ids)
    return all(name in found and found[name]["State"]["Name"] == "running" for name in ids)


def end_instances(ec2: Client, ids: Sequence[str]) -> None:
    """Terminate them, and wait until they are gone: only then are volumes and groups free."""
    if not ids:
        return
    ec2("terminate_instances", InstanceIds=list(ids))
    deadline = time.monotonic() + END_SECONDS
    while any(each["State"]["Name"] != "terminated" for each in describe(ec2, ids).values()):
        if time.monotonic() > deadline:
            raise UserError(f"AWS: {' '.join(ids)} do not end; see to them (fortyfold aws reap)")
        time.sleep(POLL_SECONDS)


def describe(ec2: Client, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By id. One that was just made may not be known everywhere yet, and one long gone no more."""
    found = ec2.list("describe_instances", "Reservations", Filters=[{"Name": "instance-id", "Values": list(ids)}])
    return {each["InstanceId"]: each for reservation in found for each in reservation["Instances"]}


def _why(instance: Mapping[str, Any]) -> str:
    return str(instance.get("StateReason", {}).get("Message") or instance["State"]["Name"])


def _address(instance: Mapping[str, Any], private: bool) -> str:
    address = instance.get("PrivateIpAddress" if private else "PublicIpAddress")
    if not address:
        raise UserError(f"AWS: instance {instance['InstanceId']} has no public address; see private in the site")
    return str(address)
