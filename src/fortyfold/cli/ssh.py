"""`fortyfold ssh`"""

import os
from typing import Annotated

import typer

from fortyfold.cli.following import RunArgument, find_run, require_job


def ssh(
    run: RunArgument,
    node: Annotated[int, typer.Option(min=0, help="Which of its nodes, counted from 0.")] = 0,
) -> None:
    """Open a shell where a run trains; in its container, if it has one."""
    from fortyfold.launch.contract import load_launcher
    from fortyfold.launch.plan import read_plan
    from fortyfold.launch.script import environment_lines, in_container

    run_dir = find_run(run)
    job, plan = require_job(run_dir), read_plan(run_dir.plan)
    way_in = [*environment_lines(plan.site), *in_container(plan, "bash")] if plan.site.container else []
    command = load_launcher(job.kind).shell(job, node, "\n".join(way_in))
    os.execvp(command[0], command)  # noqa: S606  the terminal is the shell's from here on
