"""`fortyfold runs`"""

from pathlib import Path
from typing import Annotated

import typer

from fortyfold.spec.errors import UserError
from fortyfold.spec.run_dir import RunDir

HEAD = ("run", "state", "epoch", "img/s (mean)", "top-1")


def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of runs, or one run.")] = Path("runs"),
) -> None:
    """List runs: state, epoch, mean images a second over all steps, top-1 of the last evaluation."""
    from fortyfold.metrics.overview import overview

    if not folder.is_dir():
        raise UserError(f"no folder {folder}; runs are made by fortyfold train, in runs/ unless --out says otherwise")
    own = RunDir(folder)
    found = [own] if own.exists else [RunDir(path) for path in sorted(folder.iterdir())]
    rows = [HEAD]
    for run_dir in (run_dir for run_dir in found if run_dir.exists or run_dir.plan.exists()):
        try:
            view = overview(run_dir)
        except (OSError, LookupError, TypeError, ValueError) as error:  # one damaged run must not hide the others
            rows.append((run_dir.path.name, f"unreadable: {error}", "-", "-", "-"))
            continue
        speed = f"{view.images_per_second:.0f}" if view.images_per_second else "-"
        top1 = f"{view.top1:.1f} % ({view.num_images} images)" if view.top1 is not None else "-"
        state = _job_state(run_dir) or view.state
        rows.append((view.name, state, f"{view.epoch}/{view.num_epochs}", speed, top1))
    if len(rows) == 1:
        raise UserError(f"no runs in {folder}; fortyfold train makes one")
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _job_state(run_dir: RunDir) -> str | None:
    """What the scheduler says of a run that it has, or the error that asking it gave; None for others."""
    from fortyfold.launch.contract import load_launcher, read_job

    try:
        job = read_job(run_dir)
        state = load_launcher(job.kind).state(job) if job else None
    except UserError as error:
        return str(error)
    return f"{job.kind} job {job.id}: {state}" if job and state else None
