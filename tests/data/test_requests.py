"""What batches hold: ranks' shares, rectangles, resized copies, far disks; and the loader for other people's loops."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from images import encoded, pixels

import fortyfold.data
from fortyfold.data import Loader, augment
from fortyfold.data.copies import ORIGINAL, choose_copy, copy_sides, open_copy
from fortyfold.data.disks import is_on_network
from fortyfold.data.index import Index
from fortyfold.data.reader import Reader
from fortyfold.data.requests import rectangular_requests
from fortyfold.data.splits import open_folder
from fortyfold.spec.errors import UserError


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """100 images from 1:3 to 3:1, one that cannot be read."""
    folder = tmp_path_factory.mktemp("shapes") / "a"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(100):
        width, height = rng.integers(40, 120, 2).tolist()
        (folder / f"{number:03d}.jpg").write_bytes(encoded(pixels(width, height, number)))
    (folder / "100.jpg").write_bytes(b"nothing")
    return open_folder(folder.parent)


def test_rectangles_see_every_image_once_in_batches_of_like_shape(shapes: Index) -> None:
    reader = Reader(2)
    sizes = reader.sizes(shapes)
    batches = list(reader.stream(rectangular_requests(shapes, sizes, 32, 0.875, 16)))
    assert sorted(np.concatenate([batch.ids for batch in batches]).tolist()) == list(range(101))
    assert [sample for batch in batches for sample, _ in batch.bad] == [100]
    ratios = []
    for batch in batches:
        _, height, width, _ = batch.images_nhwc.shape
        assert min(width, height) == 32 and width % 8 == height % 8 == 0 and max(width, height) <= 64
        ratios.append(width / height)
        readable = [sample for sample in batch.ids if sample != 100]
        mean = (sizes[readable, 0] / sizes[readable, 1]).mean()
        assert abs(np.log(np.clip(mean, 0.5, 2) / ratios[-1])) < 0.25
    assert ratios == sorted(ratios)


def test_a_rectangle_lies_in_its_image_and_has_the_batchs_shape() -> None:
    sizes = np.array([[500, 375], [375, 500], [300, 300], [2000, 100], [1, 1], [8, 640]])
    for width, height in ((32, 32), (48, 32), (32, 64)):
        boxes = augment.rectangular_crops(sizes, width, height, 32, 0.875)
        sides = boxes[:, 2:] - boxes[:, :2]
        assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] <= sizes).all() and (sides >= 1).all()
        large = sizes.min(axis=1) > 50
        assert np.allclose(sides[large, 0] / sides[large, 1], width / height, rtol=0.03)
    square = augment.rectangular_crops(sizes[:3], 32, 32, 32, 0.875)
    assert np.abs(square - augment.centre_crops(sizes[:3], 0.875)).max() <= 1  # the centre crop is a special case


def test_the_shares_of_ranks_make_the_global_batch(tiny_data: Path) -> None:
    loader = Loader(tiny_data / "train", threads=2)
    assert len(loader) == 250 and len(loader.classes) == 4
    whole = list(loader.epoch(3, px=16, rank_batch=30))
    assert [len(batch) for batch in whole] == [27, 28, 28, 28, 27, 28, 28, 28, 28]
    shares = [list(loader.epoch(3, px=16, rank_batch=10, rank=rank, world_size=3)) for rank in range(3)]
    for number, batch in enumerate(whole):
        parts = [share[number] for share in shares]
        assert np.array_equal(np.concatenate([part.ids for part in parts]), batch.ids)
        assert np.array_equal(np.concatenate([part.images_nhwc for part in parts]), batch.images_nhwc)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    later = next(loader.epoch(3, px=16, rank_batch=30, first_batch=5))
    assert np.array_equal(later.images_nhwc, whole[5].images_nhwc)


def test_evaluation_counts_every_image_once_over_ranks(tiny_data: Path) -> None:
    loader = Loader(tiny_data / "val", threads=1)
    shares = [list(loader.evaluation(px=16, rank_batch=8, rank=rank, world_size=3)) for rank in range(3)]
    assert sorted(int(sample) for share in shares for batch in share for sample in batch.ids) == list(range(50))


def test_a_batch_that_cannot_be_is_one_line(tiny_data: Path) -> None:
    with pytest.raises(UserError, match="250 images make no batch of 500"):
        Loader(tiny_data / "train").epoch(0, px=16, rank_batch=500, tail="drop")


def test_what_cannot_be_meant_is_one_line(tiny_data: Path) -> None:
    with pytest.raises(UserError, match="there are 'bilinear' and 'bicubic'"):
        Loader(tiny_data / "train", interpolation="nearest")
    loader = Loader(tiny_data / "train")
    for wrong in ({"tail": "dorp"}, {"shuffle": "blocks"}, {"shuffle": "block"}, {"rank": 2, "world_size": 2}):
        with pytest.raises(UserError):
            loader.epoch(0, px=16, rank_batch=8, **wrong)
    with pytest.raises(UserError, match="rank_batch = 0"):
        loader.evaluation(px=16, rank_batch=0)


def test_copies_of_a_val_with_fewer_classes_are_the_same(tmp_path: Path, fortyfold: Callable[..., Any]) -> None:
    for split, classes in (("train", "abc"), ("val", "ab")):
        for name in classes:
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for number in range(12):
                blob = encoded(pixels(60, 50, number))
                (tmp_path / "data" / split / name / f"{number}.jpg").write_bytes(blob)
    assert fortyfold("data", "resize", tmp_path / "data", tmp_path / "copies", "--short-side", "40")[0] == 0
    command = ("train", "tiny", "--data", tmp_path / "data", "--set", f"data.copies={tmp_path}/copies", "--epochs", "1")
    code, _, err = fortyfold(*command, "--out", tmp_path / "run")
    assert code == 0, err
    assert fortyfold("evaluate", tmp_path / "run")[1].splitlines()[0].endswith(f"{tmp_path}/copies/40/val at 32 px")
    code, _, err = fortyfold(*command, "--out", tmp_path / "x", "--set", "data.stage=/tmp")
    assert code == 2 and "stage copies the shards of root only" in err


def test_the_packages_public_names() -> None:
    assert fortyfold.data.__all__ == ["Loader"]
    assert all(getattr(fortyfold.data, name).__name__ == name for name in fortyfold.data.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        fortyfold.data.Nothing  # noqa: B018


def test_the_smallest_copy_that_suffices() -> None:
    sides = [160, 352]
    assert choose_copy(sides, 128, 0.875, None) == "160"
    assert choose_copy(sides, 140, 0.875, None) == "160"
    assert choose_copy(sides, 141, 0.875, None) == "352"
    assert choose_copy(sides, 288, 0.875, None) == "352"
    assert choose_copy(sides, 320, 0.875, None) == ORIGINAL
    assert choose_copy(sides, 320, 0.875, 160) == "160"
    assert choose_copy(sides, 32, 0.875, "original") == ORIGINAL
    with pytest.raises(UserError, match=r"data_copy = 200: there is no such copy \(there are 160, 352\)"):
        choose_copy(sides, 128, 0.875, 200)


def test_a_copy_with_other_files_is_refused(tiny_data: Path, tmp_path: Path) -> None:
    original = open_folder(tiny_data / "train")
    (tmp_path / "16/train/a").mkdir(parents=True)
    (tmp_path / "16/train/a/1.jpg").write_bytes(encoded(pixels(16, 16)))
    assert copy_sides(tmp_path) == [16]
    with pytest.raises(UserError, match="has other train images"):
        open_copy(tmp_path, "16", "train", original)
    with pytest.raises(UserError, match="there is no folder"):
        copy_sides(tmp_path / "nowhere")


def test_network_disks_are_known_by_their_type(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path}/far nfs4 rw 0 0\n"
        f"/dev/b {tmp_path}/far/near xfs rw 0 0\nx {tmp_path}/with\\040space lustre rw 0 0\n"
    )
    assert not is_on_network(tmp_path, mounts)
    assert is_on_network(tmp_path / "far/data", mounts)
    assert not is_on_network(tmp_path / "far/near/data", mounts)
    assert is_on_network(tmp_path / "with space/data", mounts)
    assert not is_on_network(tmp_path / "farther", mounts)
    assert not is_on_network(tmp_path, tmp_path / "nowhere")
