"""Random pairs: one message a step, no pattern that slow ranks could fall into, and everybody meets everybody.

Ranks play tournaments, each of which has its order of play drawn from (seed, its number): in a tournament every pair
meets once. Pairs drawn for each step alone would meet again at once by chance (on four ranks every third time), and mix
nothing then. With an odd number of ranks one has a rest each step.
"""

import random

from fortyfold.spec.world import World
from fortyfold.topologies import Peer


def peers(rank: int, world: World, step: int) -> list[Peer]:
    num_rounds = max(1, world.size - 1 + world.size % 2)  # an odd one plays against a rest
    tournament, round_ = divmod(step, num_rounds)
    order = list(range(world.size))
    random.Random(f"{world.seed} {tournament}").shuffle(order)  # noqa: S311 (the same on every rank)
    opponent = _opponent(order.index(rank), round_, num_rounds)
    if opponent >= world.size:
        return []
    return [Peer(order[opponent], order[opponent], 0.5)]


def _opponent(place: int, round_: int, num_rounds: int) -> int:
    """Places sit around a circle, those opposite play, and the circle turns; the last place is beside it."""
    if place == num_rounds:
        return round_
    opposite = (2 * round_ - place) % num_rounds
    return num_rounds if opposite == place else opposite
