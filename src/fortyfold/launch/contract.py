"""What a launcher is: a module of fortyfold.launch.kinds with these functions, found by its name."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol, cast

from fortyfold.launch.plan import Plan, read_plan
from fortyfold.spec import plugin
from fortyfold.spec.errors import UserError
from fortyfold.spec.run_dir import RunDir, write_atomically, write_json
from fortyfold.spec.site import BatchSite
from fortyfold.spec.stop import StopFlag

KINDS = "fortyfold.launch.kinds"

Say = Callable[[str], object]


@dataclass(frozen=True)
class Rendered:
    """What would be done: shown by --dry-run, done by submit."""

    files: Mapping[Path, str]
    """Scripts, by the place where they are written."""
    commands: list[list[str]]
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
    """Where it runs, for launchers that know."""
    alive: float = 0.0
    """Where nothing but a command looks after it: when that command last showed life; 0 when it has ended."""

    def write(self, run_dir: RunDir) -> None:
        write_json(run_dir.job, asdict(self))


def write_files(plan: Plan, rendered: Rendered, run_dir: RunDir) -> None:
    """Put the plan and the scripts into the run directory, as this machine sees it; what an earlier job left goes."""
    logs = [Path(plan.site.logs)] if isinstance(plan.site, BatchSite) and plan.site.logs else []
    for folder in (run_dir.launch, run_dir.logs, *logs):
        folder.mkdir(parents=True, exist_ok=True)
    for path in (run_dir.ended, run_dir.job, run_dir.job_id, run_dir.stop_request):
        path.unlink(missing_ok=True)
    write_json(run_dir.plan, plan.to_json())
    for path, text in rendered.files.items():
        write_atomically(run_dir.launch / path.name, text.encode())


def read_job(run_dir: RunDir) -> Job | None:
    """None for a run that was not handed over. A job that submitted itself again has another name since."""
    try:
        job = Job(**json.loads(run_dir.job.read_text(encoding="utf-8")))
        if run_dir.job_id.exists() and (number := run_dir.job_id.read_text(encoding="utf-8").strip()):
            before, now = job.id.partition(".")[0], number.partition(".")[0]
            job = replace(job, id=number, log=job.log.replace(f"job-{before}.log", f"job-{now}.log"))
        return job
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"cannot read {run_dir.job}: {error}") from None


def find_job(run_dir: RunDir) -> Job | None:
    """The same also for a run that was begun in an allocation (--interactive): its script has noted the job."""
    if (job := read_job(run_dir)) or not run_dir.job_id.exists():
        return job
    plan, number = read_plan(run_dir.plan), run_dir.job_id.read_text(encoding="utf-8").strip()
    log = run_dir.logs / f"job-{number.partition('.')[0]}.log"
    return Job(plan.site.kind, number, plan.site_name, str(log), run_dir.job_id.stat().st_mtime)


class Launcher(Protocol):
    BATCH: bool
    """Whether runs can be handed over; others need this command to stay."""

    def render(self, plan: Plan, interactive: bool) -> Rendered:
        """Pure: no command is run, and none needs to be there."""

    def submit(self, plan: Plan, rendered: Rendered) -> Job:
        """Hand it over; returns at once."""

    def run(self, plan: Plan, rendered: Rendered, run_dir: RunDir, stop: StopFlag, say: Say) -> int:
        """In the foreground, until it is over; gives the exit code of `fortyfold train`. A requested stop is passed on.
        `run_dir` is as this machine sees it."""

    def state(self, job: Job) -> str | None:
        """How it stands, in the scheduler's words; None when it is over and gone."""

    def cancel(self, job: Job, run_dir: RunDir) -> None:
        """Have it saved, ended, and not queued again."""

    def shell(self, job: Job, node: int, inside: str) -> list[str]:
        """The command that opens a shell where it runs; if not empty, `inside` is bash that leads into a container."""


def load_launcher(kind: str) -> Launcher:
    return cast(Launcher, plugin.load(KINDS, kind))
