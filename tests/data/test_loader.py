import gc
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from images import encoded, malformed, pixels

from fortyfold.data import decode
from fortyfold.data.buffers import Buffers
from fortyfold.data.index import Index
from fortyfold.data.places import Places
from fortyfold.data.reader import Batch, Reader
from fortyfold.data.requests import Sampler, eval_requests, train_requests
from fortyfold.data.splits import open_folder, open_split
from fortyfold.spec.recipe_file import load_recipe
from fortyfold.spec.timeline import Timeline, build_timeline
from fortyfold.spec.world import World


@pytest.fixture(scope="session")
def index(tiny_data: Path) -> Index:
    return open_split(tiny_data, "train")


def timeline_for(num_samples: int, global_batch: int = 32) -> Timeline:
    """Two phases: 2 epochs at 32 pixels, 1 epoch at 16."""
    changes = {"epochs": None, "global_batch": global_batch, "phases": [{"epochs": 2}, {"epochs": 1, "px": 16}]}
    return build_timeline(load_recipe("tiny", changes), num_samples, World())


def batches(index: Index, num_threads: int, first_step: int = 0, global_batch: int = 32) -> Iterator[Batch]:
    timeline = timeline_for(len(index), global_batch)
    requests = train_requests(Sampler(5), [index] * 2, timeline, first_step)
    return Reader(num_threads).stream(requests)


def test_batches_are_the_same_with_1_2_and_4_threads(index: Index) -> None:
    assert len(index) % 32 != 0
    expected = list(batches(index, 1))
    for num_threads in (2, 4):
        for one, other in zip(expected, batches(index, num_threads), strict=True):
            assert np.array_equal(one.ids, other.ids)
            assert np.array_equal(one.images_nhwc, other.images_nhwc)
            assert np.array_equal(one.labels, other.labels)


def test_an_epoch_is_a_permutation_and_labels_are_the_indexs(index: Index) -> None:
    seen = list(batches(index, 2))
    for first in (0, 8, 16):
        ids = np.concatenate([batch.ids for batch in seen[first : first + 8]])
        assert sorted(ids.tolist()) == list(range(len(index)))
    for batch in seen:
        assert np.array_equal(batch.labels, index.labels[batch.ids])
        assert (batch.weights == 1).all()
    assert {batch.images_nhwc.shape[1:] for batch in seen[:16]} == {(32, 32, 3)}
    assert {batch.images_nhwc.shape[1:] for batch in seen[16:]} == {(16, 16, 3)}


@pytest.mark.parametrize("first_step", [1, 7, 8, 13, 23])
def test_it_starts_at_any_step_with_the_same_batch(index: Index, first_step: int) -> None:
    whole = list(batches(index, 2))
    rest = list(batches(index, 2, first_step))
    assert len(rest) == len(whole) - first_step
    for one, other in zip(whole[first_step:], rest, strict=True):
        assert np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.images_nhwc, other.images_nhwc)


def test_the_same_image_is_cropped_otherwise_in_another_epoch(index: Index) -> None:
    images: dict[int, list[np.ndarray]] = {}
    for batch in list(batches(index, 2))[:16]:
        for sample, image in zip(batch.ids.tolist(), batch.images_nhwc, strict=True):
            images.setdefault(sample, []).append(image)
    different = [not np.array_equal(first, second) for first, second in images.values()]
    assert np.mean(different) > 0.95


def test_evaluation_sees_every_image_once_in_order(index: Index) -> None:
    seen = list(Reader(2).stream(eval_requests(index, 24, 0.875, 32)))
    assert np.concatenate([batch.ids for batch in seen]).tolist() == list(range(len(index)))
    assert all(batch.images_nhwc.shape[1:] == (24, 24, 3) for batch in seen)


def test_leaving_early_ends_the_threads(index: Index) -> None:
    stream = batches(index, 4)
    next(stream)
    loaders = [thread for thread in threading.enumerate() if thread.name.startswith("loader")]
    assert len(loaders) == 1
    stream.close()  # type: ignore[attr-defined]
    assert not any(thread.is_alive() for thread in loaders)


@pytest.fixture(scope="session")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """100 good images, and 200 malformed ones among them."""
    root = tmp_path_factory.mktemp("damaged")
    for name in "ab":
        (root / name).mkdir()
    for number, blob in enumerate(malformed(200)):
        (root / "ab"[number % 2] / f"bad-{number:03d}.jpg").write_bytes(blob)
    for number in range(100):
        (root / "ab"[number % 2] / f"good-{number:03d}.jpg").write_bytes(encoded(pixels(64, 48, number)))
    return open_folder(root)


def test_malformed_images_are_named_and_weigh_nothing_in_bounded_memory(damaged: Index) -> None:
    process = psutil.Process()
    peak = before = process.memory_info().rss
    bad: dict[int, str] = {}
    for batch in list(batches(damaged, 2, global_batch=30))[:10]:
        peak = max(peak, process.memory_info().rss)
        bad |= dict(batch.bad)
        named = {sample for sample, _ in batch.bad}
        assert {int(sample) for sample, weight in zip(batch.ids, batch.weights, strict=True) if weight == 0} == named
    names = [damaged.relative_path(sample) for sample in bad]
    assert 150 < len(names) <= 200
    assert all("bad-" in name for name in names)
    assert all(reason for reason in bad.values())
    assert peak - before < 300e6


def test_a_substitute_depends_on_neither_threads_nor_batch(damaged: Index) -> None:
    images: list[dict[int, bytes]] = []
    for num_threads, size in ((1, 30), (4, 30), (2, 7)):
        epoch = list(batches(damaged, num_threads, global_batch=size))[: -(-300 // size)]
        images.append({int(s): image.tobytes() for b in epoch for s, image in zip(b.ids, b.images_nhwc, strict=True)})
    assert all(one == other for one, other in pairwise(images))
    assert len(images[0]) == 300


def test_memory_is_used_again_but_never_while_a_part_of_it_is_held() -> None:
    buffers = Buffers()
    first = buffers((4, 10, 10, 3))
    address = first.ctypes.data
    first[:] = 7
    part = torch.from_numpy(first[1:3]).permute(0, 3, 1, 2)
    del first
    second = buffers((4, 10, 10, 3))
    second[:] = 9
    assert second.ctypes.data != address
    assert (part == 7).all()
    del part
    gc.collect()
    third = buffers((4, 9, 10, 3))  # a little smaller fits as well
    assert third.ctypes.data == address
    del second, third
    for size in range(1, 20):
        buffers((1000 * size,))
    assert len(buffers._free) <= 4


def test_a_fault_of_the_disk_is_not_a_bad_image(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(places: Places, row: int) -> bytes:
        raise OSError(5, "Input/output error", places.file(row))

    monkeypatch.setattr(decode, "_native", None)
    monkeypatch.setattr(Places, "read", failing)
    index.known_headers[:] = 0
    with pytest.raises(OSError, match="Input/output error"):
        next(batches(index, 2))


def test_a_file_that_vanishes_is_a_bad_image(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / f"{number}.jpg").write_bytes(encoded(pixels(40, 40, number)))
    index = open_folder(tmp_path)
    (tmp_path / "a" / "2.jpg").unlink()
    (batch,) = Reader(2).stream(eval_requests(index, 16, 1.0, 4))
    assert [sample for sample, _ in batch.bad] == [2]
    assert "No such file" in batch.bad[0][1]
    assert batch.weights.tolist() == [1, 1, 0, 1]
