"""What a run is about to make, and what that costs, for the question before anything is made."""

from fortyfold.launch.aws.group import find_own_address
from fortyfold.launch.aws.lookup import Found, look_up, require_available
from fortyfold.launch.aws.reaping import find_left
from fortyfold.launch.aws.session import connect
from fortyfold.launch.aws.tags import RUN, run_tag
from fortyfold.launch.plan import Plan
from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.nodes import parse_seconds
from fortyfold.spec.run_dir import RunDir


def preview(plan: Plan, run_dir: RunDir) -> str:
    """Asks EC2, and makes nothing. A UserError says what would go wrong."""
    assert isinstance(plan.site, AwsSite)
    ec2, tag = connect(plan.site), run_tag(run_dir)
    found, left = look_up(ec2, plan.site, len(plan.shapes)), find_left(ec2, {RUN: tag})
    own = {*left.instances, *left.ending}  # of a command that was killed; they are ended first
    require_available([volume for volume in found.volumes if volume.holder not in own])
    return describe(plan.site, len(plan.shapes), found, find_own_address(plan.site), tag)


def describe(site: AwsSite, num_nodes: int, found: Found, ssh_from: str, tag: str) -> str:
    zones = list(dict.fromkeys(subnet.zone for subnet in found.subnets))
    where = zones[0] if len(zones) == 1 else f"the first of {', '.join(zones)} with room"
    market = "spot" if site.spot else "on demand"
    lines = [
        f"to be made in {where}, with the tag {RUN}={tag}:",
        f"  {num_nodes} × {site.instance_type}, {market}, of {found.image.id} {found.image.name}".rstrip(),
        f"  1 security group: ssh from {ssh_from} only",
    ]
    if volumes := found.volumes:
        names = volumes[0].name if len(volumes) == 1 else f"{volumes[0].name} to {volumes[-1].name}"
        size = sum(volume.size_gib for volume in volumes)
        lines.append(f"attached meanwhile: {names}, {size} GiB in all, read-only at {site.mount}")
        if site.fill:
            lines.append(f"  filled from {site.fill} if empty")
    if site.keeps_runs:
        lines.append(f"the run is kept in {site.run_root}")
    return "\n".join([*lines, _costs(site, num_nodes)])


def _costs(site: AwsSite, num_nodes: int) -> str:
    hours = parse_seconds(site.time_limit) / 3600
    limit = f"all ends after {hours:.4g} h at the latest"
    if site.hourly_price is None:
        return f"{limit}; what it costs is not known here (hourly_price)"
    total = num_nodes * site.hourly_price
    return f"{limit}; {num_nodes} × {site.hourly_price:.2f} = {total:.2f} an hour, at most {total * hours:.2f} in all"
