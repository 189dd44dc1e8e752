"""What a launcher is: a module of fortyfold.launch.kinds with these functions, found by its name."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol, cast

from fortyfold.launch.plan import Plan
from fortyfold.spec import plugin
from fortyfold.spec.errors import UserError
from fortyfold.spec.run_dir import RunDir, write_json

KINDS = "fortyfold.launch.kinds"


@dataclass(frozen=True)
class Rendered:
    """What would be done: shown by --dry-run, done by submit."""

    files: Mapping[Path, str]
    """Scripts, by the place where they are written."""
    command: list[str]
    """What hands them over."""


@dataclass(frozen=True)
class Job:
    """A run that was handed over: launch/job.json of its directory."""

    kind: str
    id: str
    site_name: str
    log: str
    """The file that the job's own output goes to."""
    submitted: float
    hosts: list[str] = field(default_factory=list)

    def write(self, run_dir: RunDir) -> None:
        write_json(run_dir.job, asdict(self))


def read_job(run_dir: RunDir) -> Job | None:
    """None for a run that was not handed over."""
    try:
        return Job(**json.loads(run_dir.job.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"cannot read {run_dir.job}: {error}") from None


class Launcher(Protocol):
    def render(self, plan: Plan, interactive: bool) -> Rendered:
        """Pure: no command is run, and none needs to be there."""

    def submit(self, plan: Plan, rendered: Rendered) -> Job:
        """Hand it over; returns at once."""

    def state(self, job: Job) -> str | None:
        """The scheduler's word for how it stands; None when it knows the job no more."""

    def cancel(self, job: Job) -> None:
        """Have it saved, ended, and not queued again."""

    def shell(self, job: Job, node: int) -> list[str]:
        """The command that opens a shell where it runs."""


def load_launcher(kind: str) -> Launcher:
    return cast(Launcher, plugin.load(KINDS, kind))
