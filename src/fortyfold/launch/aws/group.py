"""The run's own security group: its members talk to each other, one address talks to them by ssh, nobody else does."""

import ipaddress
import urllib.request

from fortyfold.launch.aws.asking import among, ingress
from fortyfold.launch.aws.session import Client
from fortyfold.launch.aws.tags import run_tags, specifications
from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import UserError

WHO_AM_I = "https://checkip.amazonaws.com"
ANSWER_SECONDS = 10.0


def make_group(ec2: Client, tag: str, network: str, ssh_from: str) -> str:
    """Its id. It is tagged as it is made: `reap` finds it, even if what follows fails."""
    group = str(
        ec2(
            "create_security_group",
            GroupName=f"fortyfold-{tag}",
            Description=f"Nodes of the run {tag}",
            VpcId=network,
            TagSpecifications=specifications(run_tags(tag), "security-group"),
        )["GroupId"]
    )
    ec2.wait("security_group_exists", GroupIds=[group])  # what was just made is not known everywhere at once
    ec2("authorize_security_group_ingress", GroupId=group, IpPermissions=ingress(group, ssh_from))
    ec2("authorize_security_group_egress", GroupId=group, IpPermissions=among(group))
    return group


def find_own_address(site: AwsSite) -> str:
    """The one that ssh comes from: the site's word, or what AWS sees."""
    if site.ssh_from:
        return site.ssh_from
    try:
        with urllib.request.urlopen(WHO_AM_I, timeout=ANSWER_SECONDS) as answer:
            return str(ipaddress.IPv4Address(answer.read(100).decode().strip()))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot learn this machine's address from {WHO_AM_I}: {error}; name it: ssh_from") from None
