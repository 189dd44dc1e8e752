"""`fortyfold stop`"""

import time
from typing import Annotated

import typer

from fortyfold.cli.following import RunArgument, Watch, describe_state, find_run
from fortyfold.spec.errors import UserError


def stop(
    run: RunArgument,
    wait: Annotated[bool, typer.Option(help="Until it has ended.")] = True,
) -> None:
    """Stop a run, wherever it trains: it saves, ends, and is not queued again. The train command goes on with it."""
    from fortyfold.launch.contract import load_launcher
    from fortyfold.launch.foreground import ask_to_stop

    run_dir = find_run(run)
    watching = Watch(run_dir)
    if watching.is_over():
        raise UserError(f"{run_dir.path} does not run ({describe_state(run_dir)})")
    if watching.job is not None and watching.state():
        load_launcher(watching.job.kind).cancel(watching.job, run_dir)
    else:
        ask_to_stop(run_dir)
    print(f"asked {run_dir.path} to stop", flush=True)
    while wait and not watching.is_over():
        time.sleep(0.5)
    if wait:
        print(describe_state(run_dir))
