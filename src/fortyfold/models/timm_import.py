"""The one place that imports timm, which imports torchvision: that must have been imported with some care.

timm also imports wandb where there is one, for logging that nobody here asks of it: half a second of every start.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import fortyfold.torchvision_import  # noqa: F401 (before timm)


@contextmanager
def _without(module: str) -> Iterator[None]:
    """Whoever imports it inside finds that it is not there."""
    there = sys.modules.get(module)
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]
        if there is not None:
            sys.modules[module] = there


with _without("wandb"):
    import timm
    import timm.data
    import timm.layers
    import timm.loss
    import timm.optim
    import timm.scheduler
    import timm.utils

__all__ = ["timm"]
