"""Everybody with everybody, every step: the parameters are the same everywhere, at the price of n - 1 messages."""

from fortyfold.spec.world import World
from fortyfold.topologies import Peer


def peers(rank: int, world: World, step: int) -> list[Peer]:
    return [Peer((rank + hop) % world.size, (rank - hop) % world.size, 1 / world.size) for hop in range(1, world.size)]
