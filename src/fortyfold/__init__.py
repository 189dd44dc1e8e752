"""fortyfold: one command trains an ImageNet-class model anywhere and says where the time went.

From Python: `load_recipe`, `train` and `evaluate`; docs/guides/python.md has an example.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fortyfold.api.evaluate import evaluate
    from fortyfold.api.train import train
    from fortyfold.engine.evaluate import Evaluation
    from fortyfold.engine.train import Outcome
    from fortyfold.spec.errors import RunFailed, UserError
    from fortyfold.spec.recipe import Recipe
    from fortyfold.spec.recipe_file import load_recipe

__all__ = [
    "Evaluation", "Outcome", "Recipe", "RunFailed", "UserError", "__version__", "evaluate", "load_recipe", "train",
]  # fmt: skip

__version__ = version("fortyfold")

_PLACES = {
    "Evaluation": "engine.evaluate",
    "Outcome": "engine.train",
    "Recipe": "spec.recipe",
    "RunFailed": "spec.errors",
    "UserError": "spec.errors",
    "evaluate": "api.evaluate",
    "load_recipe": "spec.recipe_file",
    "train": "api.train",
}


def __getattr__(name: str) -> Any:
    """A public name, imported only when it is asked for: most of them need torch, the command line mostly does not."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fortyfold.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
