"""Tags: by them what was made for a run is found again, whoever looks for it.

Data volumes and snapshots have a tag of their own, and are never reaped.
"""

import getpass
import hashlib
import re
import socket
from collections.abc import Mapping
from typing import Any

from fortyfold.spec.run_dir import RunDir

RUN, OWNER, DATA = "fortyfold-run", "fortyfold-owner", "fortyfold-data"


def own_name() -> str:
    """Who makes things from here."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def run_tag(run_dir: RunDir) -> str:
    """The same each time for one run directory of one machine, and another for every other."""
    place = f"{socket.gethostname()}:{run_dir.path.absolute()}"
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", run_dir.path.name)[:64]
    return f"{name}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"


def run_tags(tag: str) -> dict[str, str]:
    return {"Name": f"fortyfold-{tag}", RUN: tag, OWNER: own_name()}


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def specifications(tags: Mapping[str, str], *types: str) -> list[dict[str, Any]]:
    """TagSpecifications: tagged as it is made, so that nothing is ever without."""
    return [{"ResourceType": type_, "Tags": tag_list(tags)} for type_ in types]


def having(tags: Mapping[str, str]) -> list[dict[str, Any]]:
    """Filters for all of these tags. None of our own values holds a wildcard."""
    return [{"Name": f"tag:{key}", "Values": [value]} for key, value in tags.items()]


def read_tags(resource: Mapping[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in resource.get("Tags", [])}
