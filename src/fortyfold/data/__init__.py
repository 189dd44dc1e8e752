"""From JPEGs to batches: order, bytes, crop boxes, pixels. `Loader` is for other people's training loops, too."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fortyfold.data.loader import Loader

__all__ = ["Loader"]


def __getattr__(name: str) -> Any:
    """`Loader` is imported only when it is asked for: commands that do not need it start faster."""
    if name == "Loader":
        from fortyfold.data.loader import Loader

        return Loader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
