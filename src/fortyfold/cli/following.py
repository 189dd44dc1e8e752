"""What the verbs that look after a run have in common: which run, whether it goes on, and how it stands."""

import time
from pathlib import Path
from typing import Annotated

import typer

from fortyfold.launch.contract import Job, find_job, load_launcher, read_job
from fortyfold.spec.errors import UserError
from fortyfold.spec.events import last_attempt, read_events
from fortyfold.spec.exit_codes import FAILED, STOPPED, TRAINED
from fortyfold.spec.run_dir import RunDir

ASK_SECONDS = 5.0  # between questions to a scheduler
SETTLE_SECONDS = 10.0  # files of a job that has just ended may show late

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or a name below runs/.")]


def find_run(run: Path) -> RunDir:
    """The run at that path, or of that name in runs/."""
    for path in (run, Path("runs") / run):
        run_dir = RunDir(path)
        if run_dir.exists or run_dir.plan.exists():
            return run_dir
    raise UserError(f"{run} is not a run: there is no run.json in it; `fortyfold runs` lists runs")


class Watch:
    """Whether a run goes on, asked often; schedulers are asked now and then, or, if `here`, never."""

    def __init__(self, run_dir: RunDir, *, here: bool = False) -> None:
        self._run_dir, self._here = run_dir, here
        self.job = None if here else read_job(run_dir)
        self._asked_at, self._state = 0.0, ""

    def state(self) -> str | None:
        """The scheduler's word; None for a run that none looks after, or that it knows no more."""
        if not self._here and time.monotonic() - self._asked_at > ASK_SECONDS:
            self.job = read_job(self._run_dir)  # it may have submitted itself again
            self._state = self._ask()
            self._asked_at = time.monotonic()
        return self._state or None

    def _ask(self) -> str:
        if self.job is None:
            return ""
        try:
            return load_launcher(self.job.kind).state(self.job) or ""
        except UserError:
            if not self._state:
                raise
            return self._state  # it does not answer; that is no news of the job

    def is_over(self) -> bool:
        return self.state() is None and not self._run_dir.is_locked()


def require_job(run_dir: RunDir) -> Job:
    job = find_job(run_dir)
    if job is None:
        raise UserError(f"{run_dir.path} was not handed over to a site; it runs, or ran, where it was started")
    return job


def exit_code(run_dir: RunDir) -> int:
    """As the command would have given that trained it."""
    events = read_events(run_dir.events())
    kind = events[-1]["kind"] if events and last_attempt(events) else ""
    return {"finished": TRAINED, "stopped": STOPPED}.get(kind, FAILED)


def describe_state(run_dir: RunDir) -> str:
    """How a run stands, in a line."""
    from fortyfold.metrics.overview import overview

    view = overview(run_dir)
    top1 = f", top-1 {view.top1:.1f} % ({view.num_images} images)" if view.top1 is not None else ""
    return f"{view.name}: {view.state}, epoch {view.epoch}/{view.num_epochs}{top1}"
