"""Several ranks that train one network. `Gossip` and `LocalSGD` are for other people's training loops, too."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fortyfold.parallel.gossip import Gossip
    from fortyfold.parallel.local_sgd import LocalSGD

__all__ = ["Gossip", "LocalSGD"]

_PLACES = {"Gossip": "gossip", "LocalSGD": "local_sgd"}


def __getattr__(name: str) -> Any:
    """A public name, imported only when it is asked for: both need torch, the launcher does not."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
