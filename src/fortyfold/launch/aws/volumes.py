"""Data volumes on their instances: attached, found by serial number, filled once when empty, mounted read-only.

The kernel's names of disks say nothing of which volume they are; an NVMe disk's serial number is the volume's id.
A volume is formatted only if nothing at all is found on it and the site says what to fill it with. A fill that was
cut short leaves a mark, and is done again.
"""

import time
from collections.abc import Sequence

from fortyfold.launch.aws.instances import Attend
from fortyfold.launch.aws.lookup import Volume
from fortyfold.launch.aws.session import Client
from fortyfold.launch.script import quote
from fortyfold.spec.aws_site import RUNS_MOUNT, AwsSite
from fortyfold.spec.errors import UserError

DEVICE = "/dev/sdf"  # EC2 wants a name; on NVMe the kernel gives another
POLL_SECONDS = 3.0
FREE_SECONDS = 300.0

_MOUNT = """\
set -eu
serial={serial} name={name} target={target}
for _ in $(seq 120); do
    device=$(lsblk -dnpro NAME,SERIAL | awk -v serial="$serial" '$2 == serial {{ print $1; exit }}')
    if [ -n "$device" ]; then break; fi
    sleep 1
done
if [ -z "$device" ]; then echo "volume $name does not appear among the disks (lsblk)" >&2; exit 1; fi
found=0
blkid -p "$device" > /dev/null || found=$?
if [ "$found" = 2 ]; then
{format}
elif [ "$found" != 0 ]; then
    echo "cannot tell what is on volume $name (blkid: $found)" >&2
    exit 1
fi
part=$(lsblk -nrpo NAME,TYPE "$device" | awk '$2 == "part" {{ print $1; exit }}')
mkdir -p "$target"
mount -o ro "${{part:-$device}}" "$target"
if [ -e "$target/.fortyfold-filling" ] || [ -z "$(find "$target" -mindepth 1 -not -name lost+found -print -quit)" ]
then
{fill}
fi
"""
_FILL = """\
    mount -o remount,rw "$target"
    touch "$target/.fortyfold-filling"
    {copy}
    mv "$target/.fortyfold-filling" "$target/.fortyfold-filled"
    sync
    mount -o remount,ro "$target\""""
_FROM_S3 = 'aws s3 sync --only-show-errors --region {region} {source} "$target"'
_NFS = "nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport"  # as AWS recommends for EFS
_FROM_EFS = f"""\
efs=$(mktemp -d)
    mount -t nfs4 -o ro,{_NFS} {{source}} "$efs"
    cp -a "$efs"/. "$target"/
    umount "$efs\""""
_EMPTY = '    echo "volume $name is empty, and the site does not say what to fill it from (fill)" >&2\n    exit 1'


def mount_script(site: AwsSite, volume: Volume) -> str:
    """For bash on the instance, as a user who may sudo."""
    fill = _FILL.format(copy=_copy(site)) if site.fill else _EMPTY
    script = _MOUNT.format(
        serial=quote(volume.id.replace("-", "")),
        name=quote(volume.name),
        target=quote(site.mount),
        format='    mkfs.ext4 -q -m 0 "$device"' if site.fill else _EMPTY,
        fill=fill,
    )
    return f"exec sudo -n bash -c {quote(script)}\n"


def _copy(site: AwsSite) -> str:
    assert site.fill is not None
    if site.fill.startswith("s3://"):
        return _FROM_S3.format(region=quote(site.region), source=quote(site.fill))
    return _FROM_EFS.format(source=quote(_nfs_source(site, site.fill)))


def _nfs_source(site: AwsSite, place: str) -> str:
    system, _, path = place.partition(":")
    return f"{system}.efs.{site.region}.amazonaws.com:{path}"


def runs_script(site: AwsSite, disk: str) -> str:
    """For bash on the instance: the folder of EFS that runs are in, where the user can write to it."""
    target, source = quote(RUNS_MOUNT), quote(_nfs_source(site, disk))
    mount = quote(f"mkdir -p {target} && mount -t nfs4 -o {_NFS} {source} {target}")
    complaint = quote(f"{disk} (run_root) cannot be written by {site.user}; make it theirs")
    return f"""\
set -eu
if ! mountpoint -q {target}; then sudo -n bash -c {mount}; fi
if ! [ -w {target} ]; then echo {complaint} >&2; exit 1; fi
"""


def attach_volumes(ec2: Client, volumes: Sequence[Volume], instances: Sequence[str]) -> None:
    """Node by node; the instances run."""
    for volume, instance in zip(volumes, instances, strict=bool(volumes)):
        ec2("attach_volume", VolumeId=volume.id, InstanceId=instance, Device=DEVICE)


def await_available(ec2: Client, volumes: Sequence[Volume], attend: Attend) -> None:
    """Until nobody has them; an instance that ends lets go of its own a little later."""
    deadline = time.monotonic() + FREE_SECONDS
    while volumes:
        attend()
        found = ec2("describe_volumes", VolumeIds=[volume.id for volume in volumes])["Volumes"]
        states = {each["VolumeId"]: str(each["State"]) for each in found}
        if all(state == "available" for state in states.values()):
            return
        if time.monotonic() > deadline:
            busy = next(volume for volume in volumes if states.get(volume.id) != "available")
            raise UserError(f"AWS: volume {busy.name} ({busy.id}) stays {states.get(busy.id, 'away')}")
        time.sleep(POLL_SECONDS)
