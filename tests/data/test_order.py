"""Guarantee 1: which sample is used when, and how it is cropped, is a pure function of (seed, epoch, id)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fortyfold.data import augment, order
from fortyfold.spec.timeline import num_batches

sizes = st.integers(1, 300)
seeds = st.integers(-(2**70), 2**70)


def epoch_ids(num_samples: int, global_batch: int, seed: int, epoch: int, tail: str) -> list[list[int]]:
    count = num_batches(num_samples, global_batch, tail)
    used = order.permutation(num_samples, seed, epoch)
    return [order.batch_keys(used, batch, count, global_batch, tail).tolist() for batch in range(count)]


@given(sizes, st.integers(1, 50), seeds, st.integers(0, 1000))
def test_an_epoch_uses_every_sample_once_in_batches_that_differ_by_one(
    n: int, size: int, seed: int, epoch: int
) -> None:
    batches = epoch_ids(n, size, seed, epoch, "keep")
    assert sorted(sample for batch in batches for sample in batch) == list(range(n))
    assert len(batches) == -(-n // size)
    lengths = [len(batch) for batch in batches]
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) <= size


@given(sizes, st.integers(1, 50))
def test_a_dropped_tail_leaves_batches_of_one_size(n: int, size: int) -> None:
    batches = epoch_ids(n, size, 0, 0, "drop")
    used = [sample for batch in batches for sample in batch]
    assert [len(batch) for batch in batches] == [size] * (n // size)
    assert len(set(used)) == len(used)


@given(sizes, st.integers(1, 50), st.integers(1, 5), st.sampled_from(["keep", "drop"]))
def test_repeats_fill_the_same_batches_with_fewer_samples(n: int, size: int, repeats: int, tail: str) -> None:
    count, used = num_batches(n, size, tail), order.permutation(n, 0, 0)
    plain = [order.batch_keys(used, batch, count, size, tail) for batch in range(count)]
    batches = [order.batch_keys(used, batch, count, size, tail, repeats) for batch in range(count)]
    assert [len(keys) for keys in batches] == [len(keys) for keys in plain]
    keys = [int(key) for batch in batches for key in batch]
    places = range(len(keys))
    assert sorted(keys) == sorted(int(used[place // repeats]) + place % repeats * n for place in places)
    for batch in batches:
        repeat = (batch // n).tolist()
        assert repeat == sorted(repeat)
        assert len(set(batch.tolist())) == len(batch)


@given(st.integers(0, 200), st.integers(1, 20))
def test_pieces_are_contiguous_whole_and_even(items: int, parts: int) -> None:
    pieces = [range(items)[order.cut(items, part, parts)] for part in range(parts)]
    assert [item for piece in pieces for item in piece] == list(range(items))
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_the_order_is_the_same_on_every_machine_and_in_every_release() -> None:
    assert order.permutation(10, 0, 0).tolist() == [5, 4, 3, 7, 6, 2, 1, 0, 8, 9]
    draws = augment.uniforms(np.arange(2), 7, 3, augment.CROP, 2)
    assert draws.ravel().tolist() == [
        0.1936763700138825, 0.20486339987981228, 0.046485336238826, 0.07940714628606516
    ]  # fmt: skip


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {tuple(order.permutation(50, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_positions_are_uniform() -> None:
    """Over many epochs each sample stands at each place about equally often (χ² with 15 × 15 degrees)."""
    counts = np.zeros((16, 16))
    for epoch in range(2000):
        counts[order.permutation(16, 1, epoch), np.arange(16)] += 1
    chi_squared = ((counts - 125) ** 2 / 125).sum()
    assert 150 < chi_squared < 320


def test_digests_add_up_over_ranks() -> None:
    ids = order.permutation(100, 0, 0)
    parts = sum(order.digest(ids[order.cut(100, rank, 3)]) for rank in range(3)) % 2**32
    assert parts == order.digest(ids)
    assert order.digest(ids[:50]) != order.digest(ids[50:])


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=8), st.floats(0.01, 1), seeds
)
def test_crops_lie_in_the_image_and_do_not_depend_on_their_neighbours(
    shapes: list[tuple[int, int]], min_scale: float, seed: int
) -> None:
    ids, dims = np.arange(len(shapes)), np.array(shapes)
    boxes = augment.random_crops(ids, dims, seed, 1, min_scale)
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] <= dims).all()
    assert (boxes[:, 2:] > boxes[:, :2]).all()
    alone = [augment.random_crops(ids[i : i + 1], dims[i : i + 1], seed, 1, min_scale)[0] for i in ids]
    assert np.array_equal(boxes, alone)
    centred = augment.centre_crops(dims, min_scale)
    assert (centred[:, :2] >= 0).all() and (centred[:, 2:] <= dims).all() and (centred[:, 2:] > centred[:, :2]).all()


def test_crops_are_distributed_as_torchvisions() -> None:
    """Mean and spread of area and aspect over 20,000 crops, against the definition: uniform and log-uniform."""
    ids = np.arange(20_000)
    boxes = augment.random_crops(ids, np.full((20_000, 2), 1000), 0, 0, 0.1)
    sides = (boxes[:, 2:] - boxes[:, :2]).astype(float)
    area, ratio = sides.prod(axis=1) / 1e6, np.log(sides[:, 0] / sides[:, 1])
    inside = area < 0.5  # where no try can fail to fit, the draw is the plain one
    assert area[inside].mean() == pytest.approx(0.3, abs=0.005)
    assert ratio[inside].mean() == pytest.approx(0, abs=0.01)
    assert ratio[inside].std() == pytest.approx(2 * np.log(4 / 3) / 12**0.5, abs=0.005)
    assert boxes[:, 0].max() > 500 and boxes[:, 1].min() == 0


def test_a_long_thin_image_gets_the_largest_centred_box() -> None:
    assert augment.random_crops(np.arange(1), np.array([[1000, 3]]), 0, 0, 0.9).tolist() == [[498, 0, 502, 3]]
    assert augment.random_crops(np.arange(1), np.array([[3, 1000]]), 0, 0, 0.9).tolist() == [[0, 498, 3, 502]]


def test_half_are_flipped_and_crops_tell_nothing_about_it() -> None:
    ids = np.arange(10_000)
    flips = augment.flips(ids, 0, 0)
    assert abs(flips.mean() - 0.5) < 0.02
    lefts = augment.random_crops(ids, np.full((10_000, 2), 500), 0, 0, 0.08)[:, 0]
    assert abs(np.corrcoef(flips, lefts)[0, 1]) < 0.03
