"""Every topology, for 1 to 64 ranks on nodes of any sizes: sends meet receives, the mean stays, all hear from all."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fortyfold.spec import plugin
from fortyfold.spec.errors import UserError
from fortyfold.spec.world import World
from fortyfold.topologies import load_topology

NAMES = plugin.names("fortyfold.topologies")
STEPS = 48  # more than any period with some repetitions
STEPS_OF_ONE_NODE = 6  # on which all send to all


topology = cache(load_topology)


def layouts(size: int) -> list[tuple[int, ...]]:
    """One node, one rank a node, halves, and unequal nodes."""
    uneven = [part for part in (size // 2, size // 3, size - size // 2 - size // 3) if part]
    return [(size,), (1,) * size, (size // 2, size - size // 2) if size > 1 else (1,), tuple(uneven)]


def matrix(name: str, world: World, step: int) -> NDArray[np.float64]:
    """What a step does to the ranks' parameters; asserts that every send has its receive."""
    peers = topology(name)
    weights = np.zeros((world.size, world.size))
    sent, received = [], []
    for rank in range(world.size):
        for peer in peers(rank, world, step):
            assert peer.send_to != rank != peer.receive_from
            sent.append((rank, peer.send_to))
            received.append((peer.receive_from, rank))
            weights[rank, peer.receive_from] += peer.weight
    assert sorted(sent) == sorted(received) and len(set(sent)) == len(sent)
    return weights + np.diag(1 - weights.sum(axis=1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", range(1, 65))
def test_it_keeps_the_mean_and_mixes(name: str, size: int) -> None:
    for nodes in layouts(size) if name == "alternating_exp_ring" else [()]:
        world = World(size, 0, nodes, seed=3)
        product = np.eye(size)
        for step in range(STEPS_OF_ONE_NODE if len(nodes) == 1 else STEPS):
            mixed = matrix(name, world, step)
            assert mixed.min() >= 0
            np.testing.assert_allclose(mixed.sum(axis=0), 1, atol=1e-12)
            np.testing.assert_allclose(mixed.sum(axis=1), 1, atol=1e-12)
            product = mixed @ product
        apart = np.linalg.norm(product - 1 / size, ord=2)  # how much of any disagreement is left
        assert apart < 1 - 1e-3, nodes


@given(st.sampled_from(NAMES), st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 10**9))
def test_any_nodes_at_any_step(name: str, sizes: list[int], step: int) -> None:
    mixed = matrix(name, World(sum(sizes), 0, tuple(sizes), seed=step % 7), step)
    np.testing.assert_allclose(mixed.sum(axis=0), 1, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_the_exponential_graph_averages_powers_of_two_exactly(size: int) -> None:
    product = np.eye(size)
    for step in range(size.bit_length() - 1):
        product = matrix("exponential", World(size), step) @ product
    np.testing.assert_array_equal(product, np.full((size, size), 1 / size))


def test_alternating_keeps_even_steps_inside_the_nodes() -> None:
    world = World(10, 0, (4, 1, 5))
    for step in range(0, 20, 2):
        for rank in range(10):
            node = next(node for node in world.nodes() if rank in node)
            assert all(peer.send_to in node for peer in load_topology("alternating_exp_ring")(rank, world, step))


def test_a_wrong_name_lists_the_right_ones() -> None:
    with pytest.raises(UserError, match=r"no topology 'rign'.*did you mean ring"):
        load_topology("rign")


@pytest.mark.parametrize("size", [2, 3, 4, 7, 10])
def test_in_a_tournament_of_matching_every_pair_meets_once(size: int) -> None:
    world, num_rounds = World(size, seed=5), size - 1 + size % 2
    for tournament in range(3):
        met = sorted(
            (rank, peer.send_to)
            for step in range(tournament * num_rounds, (tournament + 1) * num_rounds)
            for rank in range(size)
            for peer in topology("matching")(rank, world, step)
        )
        assert met == [(one, other) for one in range(size) for other in range(size) if one != other]
