"""What EC2 is asked for, as plain data: no call is made here."""

import json
from collections.abc import Mapping
from typing import Any

from fortyfold.launch.aws.host_key import HostKey
from fortyfold.launch.aws.lookup import Image
from fortyfold.launch.aws.tags import specifications
from fortyfold.spec.aws_site import AwsSite

# An instance whose launcher is gone for good ends before its time limit. (No ${…}: systemd-run would fill it in.)
_IDLE = """\
idle=0
while [ "$idle" -lt {minutes} ]; do
    sleep 60
    if ss -Htn state established '( sport = :22 )' | grep -q .; then idle=0; else idle=$((idle + 1)); fi
done
shutdown -h now"""


def user_data(site: AwsSite, key: HostKey, minutes_left: int) -> str:
    """For cloud-init: the host key, and an end, whatever becomes of the launcher. (JSON is YAML.)"""
    idle = _IDLE.format(minutes=site.idle_minutes)
    config = {
        "ssh_keys": {"ed25519_private": key.private, "ed25519_public": key.public},
        "runcmd": [
            ["shutdown", "-h", f"+{minutes_left}"],
            ["systemd-run", "--unit=fortyfold-idle", "/bin/sh", "-c", idle],
        ],
    }
    return "#cloud-config\n" + json.dumps(config, indent=1) + "\n"


def instances_request(
    site: AwsSite, num_nodes: int, image: Image, subnet: str, group: str, data: str, tags: Mapping[str, str]
) -> dict[str, Any]:
    """RunInstances: all or none, in one subnet. Shutting down from inside terminates."""
    request: dict[str, Any] = {
        "ImageId": image.id,
        "InstanceType": site.instance_type,
        "MinCount": num_nodes,
        "MaxCount": num_nodes,
        "KeyName": site.key,
        "UserData": data,
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled", "HttpPutResponseHopLimit": 1},
        "NetworkInterfaces": [
            {
                "DeviceIndex": 0,
                "SubnetId": subnet,
                "Groups": [group, *site.security_groups],
                "AssociatePublicIpAddress": not site.private,
            }
        ],
        "TagSpecifications": specifications(tags, "instance", "volume", "network-interface"),
    }
    if site.spot:
        request["TagSpecifications"] += specifications(tags, "spot-instances-request")
        options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        request["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
    if site.instance_profile:
        request["IamInstanceProfile"] = {"Name": site.instance_profile}
    if site.disk_gib:
        disk = {"VolumeSize": site.disk_gib, "VolumeType": "gp3", "DeleteOnTermination": True}
        request["BlockDeviceMappings"] = [{"DeviceName": image.root_device, "Ebs": disk}]
    return request


def ingress(group: str, ssh_from: str) -> list[dict[str, Any]]:
    """All from the group itself; ssh from one address; nothing from the world."""
    about = "the machine that gave the command"
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22}
    return [*among(group), ssh | {"IpRanges": [{"CidrIp": f"{ssh_from}/32", "Description": about}]}]


def among(group: str) -> list[dict[str, Any]]:
    """All to and from the group's own members; EFA wants it said in both directions."""
    return [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}]


def volume_request(
    name: str, zone: str, snapshot: str | None, size_gib: int | None, iops: int | None, tags: Mapping[str, str]
) -> dict[str, Any]:
    """CreateVolume: gp3, of a snapshot, or empty."""
    request: dict[str, Any] = {
        "AvailabilityZone": zone,
        "VolumeType": "gp3",
        "TagSpecifications": specifications({"Name": name, **tags}, "volume"),
    }
    given = {"SnapshotId": snapshot, "Size": size_gib, "Iops": iops}
    return request | {key: value for key, value in given.items() if value is not None}
