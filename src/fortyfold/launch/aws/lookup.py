"""What a site means at EC2: its image, its subnets, its volumes. Nothing is made, and mistakes show before anything is.

A filter's * and ? are wildcards, so names that must be exact are compared again here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fortyfold.launch.aws.session import Client
from fortyfold.launch.aws.tags import read_tags
from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import UserError


@dataclass(frozen=True)
class Image:
    id: str
    name: str
    root_device: str


@dataclass(frozen=True)
class Subnet:
    id: str
    zone: str
    network: str


@dataclass(frozen=True)
class Volume:
    id: str
    name: str
    zone: str
    state: str
    size_gib: int
    holder: str = ""
    """The instance that has it, by id."""


@dataclass(frozen=True)
class Found:
    image: Image
    subnets: tuple[Subnet, ...]
    """Those that the run may be in, the first first."""
    volumes: tuple[Volume, ...]
    """Node by node; empty where the site has none."""


def look_up(ec2: Client, site: AwsSite, num_nodes: int) -> Found:
    volumes = find_volumes(ec2, site, num_nodes) if site.volume else ()
    return Found(find_image(ec2, site), _near(find_subnets(ec2, site), volumes), volumes)


def find_image(ec2: Client, site: AwsSite) -> Image:
    """By id, or the newest of that name."""
    if site.ami.startswith("ami-"):
        found = ec2("describe_images", ImageIds=[site.ami])["Images"]
    else:
        wanted = [{"Name": "name", "Values": [site.ami]}, {"Name": "state", "Values": ["available"]}]
        found = ec2.list("describe_images", "Images", Owners=list(site.ami_owners), Filters=wanted)
    if not found:
        raise UserError(f"AWS: no image {site.ami!r} of {' or '.join(site.ami_owners)} in {site.region}; see ami")
    newest = max(found, key=lambda image: (str(image.get("CreationDate", "")), image["ImageId"]))
    return Image(newest["ImageId"], newest.get("Name", ""), newest.get("RootDeviceName", ""))


def find_subnets(ec2: Client, site: AwsSite) -> tuple[Subnet, ...]:
    """The site's, in its order; else the default network's. All of one network, as a security group is."""
    if site.subnets:
        found = ec2("describe_subnets", SubnetIds=list(site.subnets))["Subnets"]
        found.sort(key=lambda subnet: site.subnets.index(subnet["SubnetId"]))
    else:
        found = ec2.list("describe_subnets", "Subnets", Filters=[{"Name": "default-for-az", "Values": ["true"]}])
        found.sort(key=lambda subnet: str(subnet["AvailabilityZone"]))
    subnets = tuple(Subnet(one["SubnetId"], one["AvailabilityZone"], one["VpcId"]) for one in found)
    if not subnets:
        raise UserError(f"AWS: {site.region} has no default network; name subnets in the site")
    if len({subnet.network for subnet in subnets}) > 1:
        raise UserError("AWS: the site's subnets are of different networks (VPCs); keep those of one")
    return subnets


def find_volumes(ec2: Client, site: AwsSite, num_nodes: int) -> tuple[Volume, ...]:
    """Exactly one for each node, all in one zone."""
    assert site.volume is not None
    names = [f"{site.volume}_{node + site.volume_offset}" for node in range(num_nodes)]
    found = volumes_of_names(ec2, names)
    volumes = tuple(_only(found, name) for name in names)
    zones = sorted({volume.zone for volume in volumes})
    if len(zones) > 1:
        raise UserError(f"AWS: the volumes {names[0]} to {names[-1]} are in {' and '.join(zones)}, not in one zone")
    return volumes


def volumes_of_names(ec2: Client, names: Sequence[str]) -> list[Volume]:
    """Those that are there, and not being deleted."""
    found = ec2.list("describe_volumes", "Volumes", Filters=[{"Name": "tag:Name", "Values": list(names)}])
    volumes = [_read_volume(volume) for volume in found]
    return [volume for volume in volumes if volume.name in names and volume.state not in ("deleting", "deleted")]


def _read_volume(volume: dict[str, Any]) -> Volume:
    name = read_tags(volume).get("Name", "")
    holder = next((each["InstanceId"] for each in volume.get("Attachments", [])), "")
    return Volume(volume["VolumeId"], name, volume["AvailabilityZone"], volume["State"], volume["Size"], holder)


def _only(volumes: Sequence[Volume], name: str) -> Volume:
    fitting = [volume for volume in volumes if volume.name == name]
    if not fitting:
        raise UserError(f"AWS: there is no volume {name}; `fortyfold aws volumes` makes volumes of a snapshot")
    if len(fitting) > 1:
        raise UserError(f"AWS: {len(fitting)} volumes are called {name}: {' '.join(each.id for each in fitting)}")
    return fitting[0]


def require_available(volumes: Sequence[Volume]) -> None:
    for volume in volumes:
        if volume.state != "available":
            raise UserError(f"AWS: volume {volume.name} ({volume.id}) is {volume.state}, not available")


def _near(subnets: tuple[Subnet, ...], volumes: Sequence[Volume]) -> tuple[Subnet, ...]:
    """Volumes fix the zone."""
    if not volumes:
        return subnets
    near = tuple(subnet for subnet in subnets if subnet.zone == volumes[0].zone)
    if not near:
        raise UserError(f"AWS: the volumes are in {volumes[0].zone}, and no subnet of the site is; see subnets")
    return near
