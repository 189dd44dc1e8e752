"""`fortyfold ssh`"""

import os
from typing import Annotated

import typer

from fortyfold.cli.following import RunArgument, find_run, require_job


def ssh(
    run: RunArgument,
    node: Annotated[int, typer.Option(min=0, help="Which of its nodes, counted from 0.")] = 0,
) -> None:
    """Open a shell where a run trains."""
    from fortyfold.launch.contract import load_launcher

    job = require_job(find_run(run))
    command = load_launcher(job.kind).shell(job, node)
    os.execvp(command[0], command)  # noqa: S606  the terminal is the shell's from here on
