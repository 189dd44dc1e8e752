"""`fortyfold stop`"""

import signal
import time
from typing import Annotated

import typer

from fortyfold.cli.following import RunArgument, Watch, describe_state, find_run
from fortyfold.spec.errors import UserError
from fortyfold.spec.stop import StopFlag, write_request


def stop(
    run: RunArgument,
    wait: Annotated[bool, typer.Option(help="Until it has ended.")] = True,
) -> None:
    """Stop a run, wherever it trains: it saves, ends, and is not queued again. The train command goes on with it."""
    from fortyfold.launch.contract import load_launcher

    run_dir = find_run(run)
    watching = Watch(run_dir)
    if watching.is_over():
        raise UserError(f"{run_dir.path} does not run ({describe_state(run_dir)})")
    asked = StopFlag()
    asked.ask(signal.SIGINT)
    if watching.job is not None and not (watching.state() or "").startswith("running"):
        load_launcher(watching.job.kind).cancel(watching.job)
    else:
        write_request(run_dir, asked)
    print(f"asked {run_dir.path} to stop", flush=True)
    while wait and not watching.is_over():
        time.sleep(0.5)
    if wait:
        print(describe_state(run_dir))
