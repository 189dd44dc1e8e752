"""Inside the node, then between nodes, by turns: most messages stay where they are fast.

Even steps mix completely inside each node. Odd steps exchange between pairs of nodes that are 1, 2, 4… apart on the
ring of nodes, place by place; where one is larger, some of its ranks have a rest, others each time. With one node, or
with one rank a node, there is nothing to alternate with.
"""

from math import gcd

from fortyfold.spec.world import World
from fortyfold.topologies import Peer


def peers(rank: int, world: World, step: int) -> list[Peer]:
    nodes = world.nodes()
    number = next(number for number, node in enumerate(nodes) if rank in node)
    alternates = len(nodes) > 1 and max(map(len, nodes)) > 1
    if len(nodes) == 1 or (alternates and step % 2 == 0):
        return [Peer(other, other, 1 / len(nodes[number])) for other in nodes[number] if other != rank]
    return _between(rank, nodes, number, step // 2 if alternates else step)


def _between(rank: int, nodes: list[range], number: int, turn: int) -> list[Peer]:
    num_hops = (len(nodes) - 1).bit_length()
    rounds, which = divmod(turn, 2 * num_hops)
    partner = _partner(number, len(nodes), 2 ** (which // 2), which % 2)
    if partner is None:
        return []
    smaller, larger = sorted((nodes[number], nodes[partner]), key=lambda node: (len(node), node.start))
    shift = rounds % len(larger)
    pairs = {smaller[place]: larger[(place + shift) % len(larger)] for place in range(len(smaller))}
    pairs |= {other: one for one, other in pairs.items()}
    return [Peer(pairs[rank], pairs[rank], 0.5)] if rank in pairs else []


def _partner(node: int, num_nodes: int, hop: int, half: int) -> int | None:
    """Steps of `hop` lead round one or several circles of nodes; on each, every other step makes a pair of two.

    `half` says which of the steps. On a circle of odd length one node is left over.
    """
    length = num_nodes // gcd(num_nodes, hop)
    place = next(place for place in range(length) if (node - place * hop) % num_nodes < gcd(num_nodes, hop))
    other = place + 1 if place % 2 == half else place - 1
    if length % 2 and not 0 <= other < length:
        return None
    return (node + (other - place) * hop) % num_nodes
