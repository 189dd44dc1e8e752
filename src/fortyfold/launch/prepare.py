"""What happens before training on a site: the demo's data is made once, and each node stages a copy for itself."""

import sys
from collections.abc import Callable
from pathlib import Path

from fortyfold.data.demo import make_demo, wanted_demo
from fortyfold.data.prepare.work import in_words
from fortyfold.data.shards import is_sharded
from fortyfold.data.splits import find_splits, open_split
from fortyfold.data.stage import STREAMS, Staged, scratch_folder, stage
from fortyfold.launch.plan import Plan
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.recipe_file import parse_recipe

Attend = Callable[[], None]


def prepare_data(plan: Plan, attend: Attend) -> None:
    """On the first node, before the others do anything: make the demo's data, and index a folder of files once."""
    recipe = _recipe(plan)
    root = Path(recipe.data.root)
    if demo := wanted_demo(recipe.data):
        make_demo(root, demo, progress=lambda done, total: attend())
    if _scratch(plan, recipe) is None:
        open_split(root, "train", progress=lambda done, total: attend())


def stage_here(plan: Plan, attend: Attend) -> Staged | None:
    """On every node: the copy that its workers read, and how long it took to get it there."""
    recipe = _recipe(plan)
    scratch = _scratch(plan, recipe)
    if scratch is None:
        return None
    staged = stage(
        Path(recipe.data.root),
        scratch,
        STREAMS,
        lambda done, total: attend(),
        verify=True,
        say=_say,
    )
    copied, there = in_words(staged.copied_bytes), in_words(staged.there_bytes)
    _say(f"staged {copied} to {staged.root} in {staged.seconds:.0f} s, {there} were there")
    return staged


def _scratch(plan: Plan, recipe: Recipe) -> Path | None:
    """The recipe's; without one the site's, for data that can be staged."""
    if recipe.data.stage:
        return scratch_folder(recipe.data.stage)
    if not plan.site.scratch or recipe.data.copies:
        return None
    sharded = all(is_sharded(folder) for folder in find_splits(Path(recipe.data.root)).values())
    return scratch_folder(plan.site.scratch, key="scratch") if sharded else None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _recipe(plan: Plan) -> Recipe:
    return parse_recipe(plan.job["recipe"], source=f"the plan of {plan.run}")
