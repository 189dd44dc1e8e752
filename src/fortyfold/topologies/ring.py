"""Both neighbours on a ring, every step. Two ranks have one neighbour, one rank has none."""

from fortyfold.spec.world import World
from fortyfold.topologies import Peer


def peers(rank: int, world: World, step: int) -> list[Peer]:
    neighbours = {(rank + 1) % world.size, (rank - 1) % world.size} - {rank}
    return [Peer(other, other, 1 / (len(neighbours) + 1)) for other in sorted(neighbours)]
