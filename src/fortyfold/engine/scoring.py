"""Evaluating a run that is there: which checkpoint, which images, which size."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fortyfold.data.index import Index, with_classes
from fortyfold.data.items import DataSet
from fortyfold.data.own import open_own
from fortyfold.data.splits import find_split, open_folder
from fortyfold.engine import checkpoint
from fortyfold.engine.device import Feeder, choose_device, describe, open_reader
from fortyfold.engine.evaluate import Company, Networks, Scores, Views, evaluate_split
from fortyfold.engine.memory import telling
from fortyfold.engine.precision import autocast, numerics
from fortyfold.engine.setup import open_eval_copy
from fortyfold.models.build import build_model, check_fits, name_model, prepare_model
from fortyfold.parallel.ranks import Ranks
from fortyfold.spec.errors import UserError
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.recipe_file import parse_recipe
from fortyfold.spec.run_dir import MANIFEST, RunDir


@dataclass(frozen=True)
class Scoring:
    checkpoint: Path
    recipe: Recipe
    index: Index
    px: int
    networks: Networks
    device: torch.device

    def run(self, report: Callable[[int, int], None], flip: bool = False, ranks: Ranks | None = None) -> Scores:
        """Evaluate, with mirror images too if `flip` or the recipe wants that; `report` hears how many images are
        done, of how many. With several `ranks` each calls this, and looks at a share of the images."""
        ranks = ranks or Ranks()
        feed = Feeder(self.device, self.recipe.data, self.recipe.model.channels_last)
        phase = self.recipe.all_phases()[-1]
        places = phase.global_batch or (phase.rank_batch or 1) * ranks.world.size
        global_batch = max(1, places // (phase.accumulate or 1))
        views = Views(
            px=self.px,
            crop_ratio=self.recipe.evaluate.crop_ratio,
            rectangular=bool(phase.rectangular),
            flip=flip or self.recipe.evaluate.flip,
            rank_batch=max(1, global_batch // ranks.world.size),
            global_batch=global_batch,
        )
        reader = open_reader(self.recipe.data, self.device, [self.index.storage], len(ranks.world.node))
        what = f"with {views.rank_batch} images of {self.px} px at once on {describe(self.device)}"
        with numerics(self.recipe.precision), telling(what):
            scores = evaluate_split(self.networks, reader, feed, self.index, views, Company(ranks), report)
        assert scores is not None
        return scores


def open_scoring(
    target: Path, data: Path | DataSet | None, px: int | None, best: bool, own_model: torch.nn.Module | None = None
) -> Scoring:
    """Load the model behind `target`, a run directory or one of its checkpoints, and the images to score.

    `own_model` is needed for a run that was trained with one.
    """
    run_dir, path = find_checkpoint(target, best)
    spec = run_dir.read_spec()
    recipe = parse_recipe(spec["recipe"], source=str(run_dir.spec))
    try:
        snapshot = checkpoint.read(path, training=False)
    except checkpoint.Damaged as error:
        raise UserError(f"the checkpoint {path} cannot be used: {error}") from None
    classes = tuple(spec["data"]["classes"])
    last = recipe.all_phases()[-1]
    chosen_px = px or recipe.evaluate.px or last.px
    assert chosen_px is not None
    if data is None:  # the run's own images: as it saw them, from a resized copy perhaps
        index = open_eval_copy(recipe, last.data_copy, chosen_px, open_folder(_eval_folder(_own_data(spec))))
    elif isinstance(data, Path):
        index = open_folder(_eval_folder(data))
    else:
        index = open_own(data, "data", len(classes))
    index = with_classes(index, classes)
    device = choose_device()
    networks = {}
    for name, weights in (("", snapshot.model), ("ema_", snapshot.ema)):
        if weights is not None:
            networks[name] = _build(run_dir, recipe, len(classes), own_model).to(device)
            networks[name].load_state_dict(weights)
    check_fits(networks[""], len(classes), [chosen_px], bool(last.rectangular))
    precise = Networks(networks, partial(autocast, recipe.precision, device))
    return Scoring(path, recipe, index, chosen_px, precise, device)


def _build(run_dir: RunDir, recipe: Recipe, num_classes: int, own: torch.nn.Module | None) -> torch.nn.Module:
    trained = run_dir.read_spec().get("model", recipe.model.name)  # older runs had no other
    if own is not None:
        if name_model(own) != trained:
            raise UserError(f"{run_dir.path} was trained with {trained}, not with {name_model(own)}")
        return prepare_model(deepcopy(own), recipe.model)
    if trained != recipe.model.name:
        raise UserError(
            f"{run_dir.path} was trained with an own model, {trained}; evaluate it in Python: "
            "fortyfold.evaluate(run, model=…)"
        )
    return build_model(recipe.model, num_classes)


def find_checkpoint(target: Path, best: bool) -> tuple[RunDir, Path]:
    """The run behind `target`, and its newest (or best) checkpoint, or the one that `target` is."""
    if (target / MANIFEST).exists():
        return RunDir(target.resolve().parent.parent), target
    run_dir = RunDir(target)
    run_dir.read_spec()
    snapshot, passed_over = checkpoint.read_newest(run_dir, training=False)
    if snapshot is None:
        why = "".join(f"; {name}: {reason}" for name, reason in passed_over.items())
        raise UserError(f"{target} has no whole checkpoint{why}")
    if not best:
        return run_dir, run_dir.checkpoints / snapshot.name
    if snapshot.progress.best_checkpoint is None:
        raise UserError(f"{target} has no best checkpoint: nothing was evaluated, or checkpoint.best is off")
    best_path = run_dir.checkpoints / snapshot.progress.best_checkpoint
    if not best_path.is_dir():
        raise UserError(f"the best checkpoint {best_path} is gone; leave out --best for the newest")
    return run_dir, best_path


def _own_data(spec: dict[str, Any]) -> Path:
    """Where the run's own validation images were; their path in run.json is absolute."""
    if spec["data"]["val"] is None:
        raise UserError("the run was trained without validation images; give --data DIR")
    if spec["data"]["val"]["folder"] is None:
        raise UserError("the run was trained on an own data set; give --data DIR, or in Python data=…")
    return Path(spec["data"]["val"]["folder"])


def _eval_folder(root: Path) -> Path:
    """The validation images below `root`, or `root` itself when its folders are classes."""
    splits = ("train", "val", "validation", "Data", "ILSVRC")
    if root.is_dir() and not any((root / name).is_dir() for name in splits):
        return root
    return find_split(root, "val")
