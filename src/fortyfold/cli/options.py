"""Options that several verbs share, and how they change a recipe."""

from typing import Annotated, Any

import typer

from fortyfold.cli.completion import complete_key, complete_recipe
from fortyfold.cli.openmp import calm_openmp
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.recipe_file import load_recipe, parse_changes

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A built-in recipe's name, or a path to a TOML file.",
        autocompletion=complete_recipe,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change any key of the recipe, e.g. --set phases.0.px=128. Repeatable.",
        autocompletion=complete_key,
    ),
]
ProcsOption = Annotated[
    int | None,
    typer.Option(min=1, help="Processes on this machine, or on each node; default: one a GPU, or one."),
]

SHORT_FORMS = {"data.root": "--data", "model.name": "--model", "epochs": "--epochs", "optim.lr": "--lr"}


def resolve(recipe: str, assignments: list[str] | None, short_forms: dict[str, Any]) -> Recipe:
    """The recipe with --set and the short forms (dotted key → value or None) applied; short forms win."""
    changes = parse_changes(assignments or [])
    given = {key: value for key, value in short_forms.items() if value is not None}
    changes |= given
    if "data.root" in changes and not any(key.startswith("data.demo") for key in changes):
        changes["data.demo"] = None  # a folder that was named and is not there is a mistake
    return load_recipe(recipe, changes, {key: SHORT_FORMS[key] for key in given})


def choose_procs(given: int | None) -> int:
    """As many as were asked for; else one a GPU, or one."""
    if given is not None:
        return given
    calm_openmp()
    import torch

    return max(1, torch.cuda.device_count())
