"""`fortyfold logs`"""

import sys
import time
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from fortyfold.cli.following import RunArgument, Watch, find_run
from fortyfold.launch.contract import find_job
from fortyfold.spec.errors import UserError
from fortyfold.spec.run_dir import RunDir

POLL_SECONDS = 0.5


def logs(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="What that rank had to say, instead of the job.")] = None,
) -> None:
    """Print what a run's job has said so far, or one of its ranks."""
    run_dir = find_run(run)
    path = run_dir.rank_log(rank) if rank is not None else _job_log(run_dir)
    watching = Watch(run_dir)
    while follow and not path.exists() and not watching.is_over():
        time.sleep(POLL_SECONDS)
    if not path.exists():
        if watching.is_over():
            raise UserError(f"there is no {path}, and there will be none; one process alone says all at its terminal")
        raise UserError(f"there is no {path} yet; -f waits for it")
    with path.open("rb") as file:
        _copy(file)
        while follow and not watching.is_over():
            time.sleep(POLL_SECONDS)
            _copy(file)
        _copy(file)


def _job_log(run_dir: RunDir) -> Path:
    job = find_job(run_dir)
    return Path(job.log) if job is not None else run_dir.rank_log(0)


def _copy(file: BinaryIO) -> None:
    sys.stdout.buffer.write(file.read())
    sys.stdout.buffer.flush()
