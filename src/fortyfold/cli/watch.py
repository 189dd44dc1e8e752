"""`fortyfold watch`"""

import time
from typing import Annotated

import typer

from fortyfold.cli.following import RunArgument, Watch, describe_state, exit_code, find_run
from fortyfold.spec.exit_codes import STOPPED, TRAINED
from fortyfold.spec.parent import die_with_parent


def watch(
    run: RunArgument,
    here: Annotated[bool, typer.Option("--here", hidden=True, help="Ask no scheduler; end with the caller.")] = False,
) -> int:
    """Follow a run live, wherever it trains, until it ends. Ctrl-C ends the watching, and leaves the run alone.

    Exit codes: as of fortyfold train, 0 trained, 75 stopped unfinished, 1 failure.
    """
    from fortyfold.cli.display import Display

    if here:
        die_with_parent()
    run_dir = find_run(run)
    watching, told = Watch(run_dir, here=here), ""
    with Display(run_dir, line_steps=50) as display:
        while not watching.is_over():
            if (state := watching.state() or "") and state != told:
                told = state
                display.say(f"{watching.job.kind} job {watching.job.id}: {state}" if watching.job else state)
            time.sleep(0.5)
    print(describe_state(run_dir), flush=True)
    code = exit_code(run_dir)
    return code if code in (TRAINED, STOPPED) else 1
