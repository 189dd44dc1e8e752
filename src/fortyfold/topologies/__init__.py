"""Who mixes with whom in gossip. A topology is a file here with `peers(rank, world, step) -> list[Peer]`.

Pure: no process group, no device. A rank's parameters become (1 - Σ weights) of its own plus each weight times what it
receives. Over all ranks that is a doubly stochastic matrix, so the mean over the ranks never changes; over a few steps
every rank has heard from every other. Both hold for any number of ranks and any nodes (tests/contracts).
"""

from collections.abc import Callable
from dataclasses import dataclass

from fortyfold.spec import plugin
from fortyfold.spec.world import World


@dataclass(frozen=True)
class Peer:
    """One message each way, perhaps with different ranks."""

    send_to: int
    receive_from: int
    weight: float
    """How much of what is received is taken in."""


Topology = Callable[[int, World, int], list[Peer]]


def load_topology(name: str) -> Topology:
    """The topology of that name; a misspelt one is an error that names the nearest."""
    topology: Topology = plugin.load(__name__, name).peers
    return topology
