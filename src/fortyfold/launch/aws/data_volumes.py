"""Data for nodes: a snapshot of a volume, and volumes of a snapshot. They stay until somebody deletes them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fortyfold.launch.aws.asking import volume_request
from fortyfold.launch.aws.lookup import volumes_of_names
from fortyfold.launch.aws.session import Client
from fortyfold.launch.aws.tags import DATA, OWNER, own_name, read_tags, specifications
from fortyfold.spec.errors import UserError

POLL_SECONDS = 10.0
Say = Callable[[str], object]


def make_snapshot(ec2: Client, volume: str, name: str) -> str:
    """Of a volume by its id or name; the snapshot's id. It goes on by itself until it is complete."""
    id_ = volume if volume.startswith("vol-") else _volume_id(ec2, volume)
    tags = {"Name": name, DATA: name, OWNER: own_name()}
    answer = ec2(
        "create_snapshot",
        VolumeId=id_,
        Description=f"fortyfold data {name}",
        TagSpecifications=specifications(tags, "snapshot"),
    )
    return str(answer["SnapshotId"])


def _volume_id(ec2: Client, name: str) -> str:
    found = volumes_of_names(ec2, [name])
    if len(found) != 1:
        raise UserError(f"AWS: {len(found) or 'no'} volumes are called {name}; give an id such as vol-0123")
    return found[0].id


def await_snapshot(ec2: Client, snapshot: str, say: Say) -> None:
    """Until volumes can be made of it."""
    said = ""
    while (found := _read_snapshot(ec2, snapshot))["State"] != "completed":
        if found["State"] == "error":
            raise UserError(f"AWS: the snapshot {snapshot} failed: {found.get('StateMessage', '')}; delete it")
        if said != (said := str(found.get("Progress") or "")):
            say(f"{snapshot} {said}")
        time.sleep(POLL_SECONDS)


def _read_snapshot(ec2: Client, snapshot: str) -> dict[str, Any]:
    found: dict[str, Any] = ec2("describe_snapshots", SnapshotIds=[snapshot])["Snapshots"][0]
    return found


def find_snapshot(ec2: Client, snapshot: str) -> dict[str, Any]:
    """One's own, by id or name; of several of a name the newest that is complete."""
    if snapshot.startswith("snap-"):
        return _read_snapshot(ec2, snapshot)
    wanted = [{"Name": "tag:Name", "Values": [snapshot]}, {"Name": "status", "Values": ["completed"]}]
    found = ec2.list("describe_snapshots", "Snapshots", OwnerIds=["self"], Filters=wanted)
    exact = [each for each in found if read_tags(each).get("Name") == snapshot]
    if not exact:
        raise UserError(f"AWS: no snapshot {snapshot!r} is complete; `fortyfold aws snapshot` makes one")
    return max(exact, key=lambda each: str(each.get("StartTime", "")))


def require_new(ec2: Client, names: list[str]) -> None:
    """A name means one volume."""
    if found := volumes_of_names(ec2, names):
        raise UserError(f"AWS: there is a volume {found[0].name} already ({found[0].id}); see --offset")


def make_volumes(
    ec2: Client, names: list[str], zone: str, snapshot: str | None, size_gib: int | None, iops: int | None
) -> list[str]:
    """Their ids; all of them, or none is left."""
    made: list[str] = []
    with _undone_on_error(ec2, made):
        for name in names:
            tags = {DATA: name, OWNER: own_name()}
            answer = ec2("create_volume", **volume_request(name, zone, snapshot, size_gib, iops, tags))
            made.append(str(answer["VolumeId"]))
    return made


@contextmanager
def _undone_on_error(ec2: Client, made: list[str]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for volume in made:
            with suppress(UserError):
                ec2("delete_volume", VolumeId=volume)
        raise
