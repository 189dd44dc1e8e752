"""Random pairs, drawn anew every step from (seed, step): one message, no pattern that slow ranks could fall into.

With an odd number of ranks one has a rest.
"""

import random

from fortyfold.spec.world import World
from fortyfold.topologies import Peer


def peers(rank: int, world: World, step: int) -> list[Peer]:
    order = list(range(world.size))
    random.Random(f"{world.seed} {step}").shuffle(order)  # noqa: S311 (the same on every rank)
    place = order.index(rank)
    if place ^ 1 >= world.size:
        return []
    return [Peer(order[place ^ 1], order[place ^ 1], 0.5)]
