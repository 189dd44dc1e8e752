"""Repeated augmentation: an image stands several times in a batch, cropped, flipped and changed anew each time."""

from pathlib import Path

import numpy as np
import pytest
from images import encoded, pixels

from fortyfold.data.blocks import GROUP_IMAGES
from fortyfold.data.index import Index, Shards
from fortyfold.data.places import Places
from fortyfold.data.reader import Batch, Reader
from fortyfold.data.requests import BatchShape, Sampler
from fortyfold.data.splits import open_folder
from fortyfold.spec.recipe import Augment
from fortyfold.spec.world import World

THRICE = Augment(repeats=3, policy="trivial", erase=0.3, mixup=0.5, cutmix=1, mix_each="image")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """50 images, three of which cannot be read."""
    folder = tmp_path_factory.mktemp("repeats")
    (folder / "a").mkdir()
    for number in range(50):
        blob = b"no" if number % 20 == 3 else encoded(pixels(48, 40, number))
        (folder / "a" / f"{number:02d}.jpg").write_bytes(blob)
    return open_folder(folder)


def epoch(index: Index, augment: Augment, world: World | None = None, tail: str = "keep") -> list[Batch]:
    num_batches = len(index) // 12 if tail == "drop" else -(-len(index) // 12)
    sampler, shape = Sampler(4, tail, world=world, augment=augment), BatchShape(num_batches, 12, 16, 0.3)
    return list(Reader(2).stream(sampler.request(index, 2, batch, shape) for batch in range(num_batches)))


@pytest.mark.parametrize("tail", ["keep", "drop"])
def test_an_epoch_has_as_many_places_of_a_third_of_the_images(index: Index, tail: str) -> None:
    plain, batches = epoch(index, Augment(), tail=tail), epoch(index, Augment(repeats=3), tail=tail)
    assert [len(batch) for batch in batches] == [len(batch) for batch in plain]
    ids = np.concatenate([batch.ids for batch in batches])
    _, counts = np.unique(ids, return_counts=True)
    assert set(counts[counts < 3]) <= {1, 2} and (counts < 3).sum() <= 1
    assert set(ids) == set(np.concatenate([batch.ids for batch in plain])[: -(-len(ids) // 3)])


def test_each_time_it_is_another_crop_and_neighbours_are_other_images(index: Index) -> None:
    views: dict[int, set[bytes]] = {}
    for batch in epoch(index, Augment(repeats=3)):
        assert (batch.ids[::2][: len(batch) // 2] != batch.ids[1::2]).all()
        for sample, image, weight in zip(batch.ids, batch.images_nhwc, batch.weights, strict=True):
            views.setdefault(int(sample), set()).add(image.tobytes() if weight else b"")
        for sample, reason in batch.bad:
            assert sample % 20 == 3 and reason
    assert sorted({len(seen) for sample, seen in views.items() if sample % 20 != 3})[-1] == 3
    assert np.mean([len(seen) == 3 for sample, seen in views.items() if sample % 20 != 3]) > 0.9


def test_the_first_time_is_what_it_would_be_without_repeats(index: Index) -> None:
    def views(augment: Augment) -> dict[int, bytes]:
        first: dict[int, bytes] = {}
        for batch in epoch(index, augment):
            for sample, image in zip(batch.ids, batch.images_nhwc, strict=True):
                first.setdefault(int(sample), image.tobytes())
        return first

    once = views(Augment())
    several = views(Augment(repeats=2))  # batches of 12 begin with first repeats
    assert several.items() <= once.items() and len(several) == 25


def test_any_number_of_ranks_makes_the_same_batches(index: Index) -> None:
    whole = epoch(index, THRICE)
    for size in (2, 3, 4):
        shares = [epoch(index, THRICE, World(size, rank)) for rank in range(size)]
        for batch, parts in zip(whole, zip(*shares, strict=True), strict=True):
            own = [part.images_nhwc[: len(part)] for part in parts]
            assert np.array_equal(np.concatenate([part.ids for part in parts]), batch.ids)
            assert np.array_equal(np.concatenate(own), batch.images_nhwc)
            assert sorted(entry for part in parts for entry in part.bad) == batch.bad


@pytest.mark.parametrize("repeats", [1, 3])
def test_in_blocks_what_a_batch_uses_was_fetched_with_it_or_before(repeats: int) -> None:
    count = 5 * GROUP_IMAGES + 77
    places = Places([b"x"], np.zeros(count, np.int32), np.arange(count) * 20_000, np.full(count, 9000))
    shards = Shards(places, np.zeros(count, np.uint32), np.ones((count, 3), np.int32))
    index = Index(Path("x"), ("a",), np.zeros(count, np.int32), b"", np.zeros(count, np.int64), shards)
    sampler = Sampler(0, shuffle="block", augment=Augment(repeats=repeats))
    shape = BatchShape(40, -(-count // 40), 16, 0.3)
    fetched: set[int] = set()
    for batch in range(40):
        request = sampler.request(index, 0, batch, shape)
        fetched |= set((request.fetch().offsets // 20_000).tolist())
        assert set(request.ids.tolist()) <= fetched
    assert len(fetched) <= count // repeats + GROUP_IMAGES + 1
