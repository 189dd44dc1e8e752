"""`fortyfold sink`"""

from pathlib import Path
from typing import Annotated

import typer

from fortyfold.cli.options import SetOption
from fortyfold.spec.recipe_file import parse_changes
from fortyfold.spec.run_dir import RunDir


def sink(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="csv, tensorboard or wandb.")],
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run ends, or Ctrl-C.")] = False,
    set_: SetOption = None,
) -> None:
    """Write a run's figures to CSV, TensorBoard or Weights & Biases, while it runs or afterwards."""
    from fortyfold.sinks import write_run
    from fortyfold.spec.stop import StopFlag

    run_dir, stop = RunDir(run), StopFlag()
    if follow:
        stop.listen()
    place = write_run(
        name, run_dir, parse_changes(set_ or []), lambda: follow and not stop.requested and run_dir.is_locked()
    )
    print(f"written to {place}" if place else f"{run} was moved away; what was written is there")
