"""A run and the place it goes to: all that a launcher needs for its script, and a node for its part. Plain data."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.nodes import Gpus, NodeShape
from fortyfold.spec.site import BatchSite, RemoteSite, Site
from fortyfold.spec.site_file import parse_site

FORMAT = 1


@dataclass(frozen=True)
class Plan:
    site_name: str
    site: Site
    shapes: tuple[NodeShape, ...]
    """What is asked for, node by node."""
    run: Path
    """The run directory, as the nodes see it; ~ is their home folder."""
    folder: Path | None
    """Where the nodes work, and relative paths of the recipe begin: the folder of the command; None: at home."""
    python: str
    """The interpreter on the nodes."""
    job: dict[str, Any]
    """What the workers are told (launch/environment.py)."""
    fresh: bool = False
    """Whether hosts that share no disk are to set aside what they have of the run; nothing that nodes are told."""

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def checks(self) -> bool:
        """Whether nothing is to be trained, only the nodes to be looked at (`sites check`)."""
        return bool(self.job["verb"] == "check")

    @property
    def num_ranks(self) -> int:
        return sum(shape.procs for shape in self.shapes)

    @property
    def apart(self) -> bool:
        """Whether the nodes share no disk: the run directory is the first one's."""
        return is_apart(self.site)

    @property
    def store(self) -> str | None:
        """Where on S3 the run is kept, if it is."""
        root = self.site.run_store if isinstance(self.site, AwsSite) else None
        return f"{root}/{self.name}" if root else None

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "site_name": self.site_name,
            "site": self.site.model_dump(mode="json", exclude_defaults=True),
            "shapes": [asdict(shape) for shape in self.shapes],
            "run": str(self.run),
            "folder": str(self.folder) if self.folder else None,
            "python": self.python,
            "job": self.job,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Plan":
        if value.get("format") != FORMAT:
            raise UserError("the plan was made by another version of fortyfold; give the train command again")
        shapes = tuple(NodeShape(**shape | {"gpus": Gpus(**shape["gpus"])}) for shape in value["shapes"])
        site = parse_site(value["site"], source=f"the plan of {value['run']}")
        run, folder = Path(value["run"]), Path(value["folder"]) if value["folder"] else None
        return cls(value["site_name"], site, shapes, run, folder, value["python"], value["job"])


def read_plan(path: Path) -> Plan:
    try:
        return Plan.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise RunFailed(f"cannot read the plan {path}: {error}") from None


def make_plan(site_name: str, site: Site, run: Path, job: dict[str, Any], nodes: int | None, procs: int | None) -> Plan:
    """The site's wishes with the command's; a UserError where they do not fit."""
    try:
        shapes = site.shapes(nodes, procs)
    except ValueError as error:
        raise UserError(f"site {site_name}: {error}") from None
    own = site.conda or site.venv or site.container
    python = site.python or ("python3" if own else sys.executable)
    folder = None if is_apart(site) else Path.cwd()
    if isinstance(site, BatchSite) and site.logs:  # jobs begin in other folders
        site = site.model_copy(update={"logs": str(Path(site.logs).expanduser().absolute())})
    return Plan(site_name, site, shapes, run, folder, python, job)


def is_apart(site: Site) -> bool:
    """Whether the site's nodes share no disk, neither with one another nor with the machine that commands."""
    return isinstance(site, RemoteSite) and not site.shared


def runs_here(site: Site) -> Path:
    """The folder of runs as this machine sees it: the nodes' own, or that of copies where no disk is shared."""
    return Path("runs" if is_apart(site) else site.run_folder or "runs").expanduser().absolute()


def place_there(site: Site, here: Path) -> Path:
    """A run directory as the nodes see it: the one that this machine sees, or its original."""
    return Path(site.run_folder or "~/runs") / here.name if is_apart(site) else here


def describe_shapes(shapes: Sequence[NodeShape]) -> str:
    """ "2 nodes of 4 processes", "3 nodes of 2, 2 and 1 processes"."""
    counts = [shape.procs for shape in shapes]
    nodes = f"{len(counts)} node{'s' if len(counts) > 1 else ''}"
    if len(set(counts)) == 1:
        return f"{nodes} of {counts[0]} process{'es' if counts[0] > 1 else ''}"
    return f"{nodes} of {', '.join(map(str, counts[:-1]))} and {counts[-1]} processes"
