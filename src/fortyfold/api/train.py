"""`fortyfold.train`: what the command does, for scripts and notebooks, with own models and data."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fortyfold.api.listen import OnEvent, listening
from fortyfold.data.demo import make_demo, wanted_demo
from fortyfold.data.index import Index
from fortyfold.data.items import DataSet
from fortyfold.data.own import open_own
from fortyfold.data.stage import STREAMS, Staged, scratch_folder, stage
from fortyfold.engine.setup import Own
from fortyfold.engine.train import Outcome
from fortyfold.engine.train import train as train_run
from fortyfold.launch.attach import attached
from fortyfold.parallel.pulse import Pulse
from fortyfold.parallel.ranks import Ranks, joined
from fortyfold.sinks import require_sinks
from fortyfold.spec.errors import UserError
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.recipe_file import load_recipe
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag


def train(
    recipe: Recipe | str | Path,
    *,
    model: torch.nn.Module | None = None,
    train_data: DataSet | None = None,
    val_data: DataSet | None = None,
    num_classes: int | None = None,
    out: str | Path | None = None,
    on_event: OnEvent | None = None,
    fresh: bool = False,
    auto_accumulate: bool = False,
) -> Outcome:
    """Train a recipe (or the one of that name or path) to its end, or go on with it; gives how it ended.

    `model` takes the place of the recipe's; it is moved to the device and trained in place, and must have an output a
    class. `train_data` and `val_data` take the place of the recipe's folder: objects with a length, whose items are
    (image, label); images are RGB bytes (NumPy H×W×3, torch 3×H×W, or Pillow's) of any size, which are cropped and
    changed as the recipe says. Their `classes` name the classes; where there is nothing of the kind, `num_classes`
    counts them.

    `out` is the run directory, by default runs/NAME. The same call goes on after a stop or a kill; `fresh` moves what
    is there aside. `on_event` is called, in another thread, with each event as docs/guides/run-directory.md lists
    them. In the main thread Ctrl-C and SIGTERM stop the run after its step: it is saved, and `finished` is False.
    Started by torchrun, each rank calls this, and all train together; events and sinks are rank 0's.
    Bad input is a UserError, a run that cannot go on a RunFailed, each with one line to read.
    """
    chosen = load_recipe(str(recipe)) if isinstance(recipe, str | Path) else recipe
    if model is not None and not isinstance(model, torch.nn.Module):
        raise UserError(f"model is no torch.nn.Module but {model!r}")
    require_sinks(chosen.log.sinks)
    run_dir = RunDir(Path(out) if out else Path("runs") / chosen.name)
    own = Own(model, *_open_data(train_data, val_data, num_classes))
    with StopFlag().listening() as stop, joined(chosen.seed) as ranks, _pulsing(chosen, ranks) as pulse:
        if ranks.many and auto_accumulate:
            raise UserError("auto_accumulate is for one rank; set accumulate in the recipe")
        staged = _prepare(chosen, ranks) if own.train is None else None
        ranks.from_first(lambda: str(run_dir.set_aside()) if fresh else None)
        sinks, hears = (chosen.log.sinks, on_event) if ranks.first else ((), None)
        with attached(run_dir, sinks, stop), listening(run_dir, hears):
            return train_run(
                chosen, run_dir, stop, sys.argv, staged, own=own, auto_accumulate=auto_accumulate, ranks=ranks,
                pulse=pulse,
            )  # fmt: skip


@contextmanager
def _pulsing(recipe: Recipe, ranks: Ranks) -> Iterator[Pulse | None]:
    """Under torchrun a rank that is lost ends the others, by the recipe's deadline."""
    if not ranks.many or "MASTER_ADDR" not in os.environ:
        yield None
        return
    pulse = Pulse.from_environment(ranks.world, recipe.strategy.deadline_seconds).start()
    try:
        yield pulse
    finally:
        pulse.close()


def _open_data(
    train_data: DataSet | None, val_data: DataSet | None, num_classes: int | None
) -> tuple[Index | None, Index | None]:
    if train_data is None:
        if val_data is not None:
            raise UserError("val_data without train_data: give both, or data.root in the recipe")
        if num_classes is not None:
            raise UserError("num_classes is for train_data; a folder's classes are counted")
        return None, None
    train = open_own(train_data, "train_data", num_classes)
    if val_data is None:
        return train, None
    return train, open_own(val_data, "val_data", len(train.classes), counted_by="train_data has")


def _prepare(recipe: Recipe, ranks: Ranks) -> Staged | None:
    """Make the demo data if the recipe wants it, stage if it wants that; gives the staged copy.

    Of several ranks the first of all makes the data, and the first on each node stages it.
    """
    if (demo := wanted_demo(recipe.data)) and ranks.first:
        make_demo(Path(recipe.data.root), demo, num_workers=1)  # processes would import the caller's script again
    ranks.gather(None)
    if recipe.data.stage is None:
        return None
    root, scratch = Path(recipe.data.root), scratch_folder(recipe.data.stage)
    first_here = ranks.world.rank == ranks.world.node[0]
    staged = stage(root, scratch, STREAMS, lambda done, total: None) if first_here else None
    ranks.gather(None)
    return staged or stage(root, scratch, STREAMS, lambda done, total: None)  # what is there is only looked at
