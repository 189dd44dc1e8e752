"""From JPEGs to batches: order, bytes, crop boxes, pixels. `Loader` is for other people's training loops, too."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fortyfold.data.loader import Loader
    from fortyfold.spec.recipe import Augment

__all__ = ["Augment", "Loader"]


def __getattr__(name: str) -> Any:
    """Both are imported only when they are asked for: commands that need neither start faster."""
    if name == "Augment":
        from fortyfold.spec.recipe import Augment

        return Augment
    if name == "Loader":
        from fortyfold.data.loader import Loader

        return Loader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
