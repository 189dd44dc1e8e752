"""One peer a step, twice as far each time, then from the start again: one message, and all have heard from all after
⌈log2 n⌉ steps. For a power of two that is the exact mean."""

from fortyfold.spec.world import World
from fortyfold.topologies import Peer


def peers(rank: int, world: World, step: int) -> list[Peer]:
    if world.size == 1:
        return []
    hop = 2 ** (step % (world.size - 1).bit_length())
    return [Peer((rank + hop) % world.size, (rank - hop) % world.size, 0.5)]
