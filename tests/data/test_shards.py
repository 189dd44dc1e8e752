"""Shards: the same samples, order and pixels as the folder; readable by others; made whole despite kills."""

import gc
import io
import json
import os
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import skip_or_fail
from images import encoded, pixels
from kills import contents, finish_despite_kills
from PIL import Image

from fortyfold.data import decode
from fortyfold.data.blocks import BLOCK_IMAGES, GROUP_IMAGES, block_sequence, mix_groups, stretches
from fortyfold.data.index import Index
from fortyfold.data.places import Place, why_unreadable
from fortyfold.data.prepare.shard import Sharding, count_shards, make_shards, source_sizes
from fortyfold.data.reader import Batch, Reader
from fortyfold.data.requests import BatchShape, Sampler
from fortyfold.data.shards import INDEX_NAME, shard_files
from fortyfold.data.splits import open_folder
from fortyfold.spec.errors import UserError

Fortyfold = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Class folders with images of all kinds, one that cannot be read, and odd names."""
    root = tmp_path_factory.mktemp("source") / "train"
    for number in range(60):
        folder = root / ("a", "b.c", "ü")[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        picture = pixels(80 + number, 130 - number, number)
        (folder / f"{number}.x.JPEG").write_bytes(encoded(picture, quality=90, progressive=number % 2 == 0))
    (root / "a" / "png in disguise.jpg").write_bytes(encoded(pixels(40, 30), "PNG"))
    (root / "a" / "real.png").write_bytes(encoded(pixels(40, 30), "PNG"))
    (root / "b.c" / "cut.jpg").write_bytes(encoded(pixels(64, 64))[:300])
    (root / "b.c" / "empty.jpg").touch()
    return open_folder(root)


def sharded(
    source: Index, folder: Path, num_shards: int = 3, tile: str = "always", part: tuple[int, int] = (0, 1)
) -> Index:
    if tile != "never" and not decode.is_native():
        skip_or_fail("native", "the native decoder was not built")
    make_shards(Sharding(source, num_shards, tile), folder, part, 2, source_sizes(source, 2), lambda done, total: None)
    return open_folder(folder)


@pytest.fixture(scope="module")
def shards(source: Index, tmp_path_factory: pytest.TempPathFactory) -> Index:
    return sharded(source, tmp_path_factory.mktemp("shards") / "train")


def epoch(index: Index, shuffle: str = "global", read_ahead: int = 0, prefetch: int = 2) -> list[Batch]:
    sampler, shape = Sampler(3, shuffle=shuffle), BatchShape(-(-len(index) // 16), 16, 40, 0.2)
    requests = (sampler.request(index, 1, batch, shape) for batch in range(shape.num_batches))
    return list(Reader(2, prefetch, read_ahead).stream(requests))


def test_the_same_samples_in_the_same_order_with_the_same_pixels(source: Index, shards: Index) -> None:
    assert shards.fingerprint == source.fingerprint
    assert shards.classes == source.classes
    for one, other in zip(epoch(source), epoch(shards), strict=True):
        assert np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.labels, other.labels)
        assert np.array_equal(one.images_nhwc, other.images_nhwc)
        assert one.bad == other.bad
        assert np.array_equal(one.weights, other.weights)


@pytest.mark.parametrize("tile", ["never", "always"])
def test_the_bytes_are_the_sources_or_a_lossless_copy(source: Index, tmp_path: Path, tile: str) -> None:
    index = sharded(source, tmp_path / "train", tile=tile)
    assert index.shards is not None
    ids = np.arange(len(source))
    for row in range(len(source)):
        before, after = source.places(ids).read(row), index.places(ids).read(row)
        name = source.relative_path(row)
        assert index.relative_path(row) == name
        if tile == "never" or not name.endswith(".JPEG"):
            assert before == after
        else:
            assert before != after
            with Image.open(io.BytesIO(before)) as one, Image.open(io.BytesIO(after)) as other:
                assert np.array_equal(np.asarray(one), np.asarray(other))


def test_webdataset_reads_them(source: Index, shards: Index) -> None:
    webdataset = pytest.importorskip("webdataset")
    files = sorted(str(path) for path in shards.folder.glob("*.tar"))
    read = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # webdataset does not close its files
        for sample in webdataset.WebDataset(files, shardshuffle=False):
            read[int(sample["__key__"])] = (int(sample["cls"]), sample.get("jpg", sample.get("png")))
        gc.collect()
    assert sorted(read) == list(range(len(source)))
    for sample, (label, blob) in read.items():
        assert label == source.labels[sample]
        if not source.relative_path(sample).endswith(("cut.jpg", "empty.jpg")):
            original = source.places(np.array([sample])).read(0)
            with Image.open(io.BytesIO(blob)) as one, Image.open(io.BytesIO(original)) as other:
                assert np.array_equal(np.asarray(one), np.asarray(other))


def test_tar_members_are_plain_and_the_index_leads_to_them(shards: Index) -> None:
    assert shards.shards is not None
    found = {}
    for path in sorted(shards.folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                found[member.name] = (path, member.offset_data, member.size)
                assert (member.uid, member.mtime, member.mode) == (0, 0, 0o644)
    for sample in range(len(shards)):
        suffix = "png" if shards.relative_path(sample).endswith(".png") else "jpg"
        path, offset, size = found[f"{sample:09d}.{suffix}"]
        place = shards.shards.places.one(sample)
        assert (place.file, place.offset, place.length) == (bytes(path), offset, size)
        assert f"{sample:09d}.cls" in found


def test_unreadable_images_are_kept_and_named(source: Index, tmp_path: Path, fortyfold: Fortyfold) -> None:
    code, out, _ = fortyfold("data", "shard", source.folder, tmp_path / "out", "--shards", 2)
    assert code == 0
    assert f"{len(source)} images" in out and "in 2 shards" in out
    assert "kept as it is, since it cannot be read: b.c/empty.jpg (the file is empty)" in out
    assert "already there" in fortyfold("data", "shard", source.folder, tmp_path / "out", "--shards", 2)[1]


def test_parts_make_what_one_makes(source: Index, tmp_path: Path, fortyfold: Fortyfold) -> None:
    whole, parts = tmp_path / "whole/train", tmp_path / "parts/train"
    sharded(source, whole, num_shards=5)
    for part in ("2/3", "1/3"):
        _, out, _ = fortyfold("data", "shard", source.folder, parts, "--shards", 5, "--tile", "always", "--part", part)
        assert f"part {part} is there" in out and "of other parts are not" in out
    assert not (parts / INDEX_NAME).exists()
    _, out, _ = fortyfold("data", "shard", source.folder, parts, "--shards", 5, "--tile", "always", "--part", "3/3")
    assert "in 5 shards" in out
    assert contents(whole) == contents(parts)


def test_killed_at_any_moment_the_same_command_makes_the_same_bytes(source: Index, tmp_path: Path) -> None:
    big = tmp_path / "source"
    for copy in range(8):
        for path in source.folder.rglob("*.*"):
            if path.is_file():
                target = big / path.parent.name / f"{copy}-{path.name}"
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, target)
    for name, num_kills in (("calm", 0), ("killed", 4)):
        arguments = ("data", "shard", big, tmp_path / name / "train", "--shards", 40, "--tile", "always")
        finish_despite_kills(num_kills, *arguments, most_seconds=1.2)
    assert contents(tmp_path / "calm") == contents(tmp_path / "killed")
    assert not list((tmp_path / "killed").rglob(".*"))


def test_what_killed_jobs_left_is_swept_away(source: Index, tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    left = [".000000.part", ".000001.rows", "..000001.rows.4711", ".shards.plan.12", ".shards.index.3"]
    for name in (*left, ".mine"):
        (folder / name).touch()
    sharded(source, folder, num_shards=2, tile="never")
    names = sorted(path.name for path in folder.iterdir())
    assert names == [".mine", "shards.index", "train-000000.tar", "train-000001.tar"]


def test_a_link_that_leads_nowhere_is_kept_as_an_unreadable_image(tmp_path: Path, fortyfold: Fortyfold) -> None:
    (tmp_path / "src/a").mkdir(parents=True)
    (tmp_path / "src/a/1.jpg").write_bytes(encoded(pixels(40, 30)))
    (tmp_path / "src/a/2.jpg").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "src/a/3.jpg")
    (tmp_path / "src/a/.4.jpg").touch()  # hidden: no image
    code, out, _ = fortyfold("data", "shard", tmp_path / "src", tmp_path / "dst", "--tile", "never")
    assert code == 0 and "3 images" in out
    assert "a/2.jpg (No such file or directory)" in out and "a/3.jpg (not a file)" in out


def test_a_part_whose_plan_appears_meanwhile_goes_on(
    source: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read_text, calls = tmp_path / "train", Path.read_text, [0]

    def late(path: Path, *arguments: Any, **options: Any) -> str:
        calls[0] += path.name == "shards.plan"
        if calls[0] == 1:  # the other part's plan is written right after we looked
            calls[0] += 1
            path.write_bytes(json.dumps(Sharding(source, 2, "never").plan()).encode())
            raise FileNotFoundError
        return read_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", late)
    assert len(sharded(source, folder, num_shards=2, tile="never")) == len(source)


def test_a_shard_that_is_missing_is_found_at_the_start(source: Index, tmp_path: Path) -> None:
    folder = tmp_path / "train"
    sharded(source, folder, tile="never")
    os.truncate(folder / "train-000001.tar", 100)
    with pytest.raises(UserError, match=r"train-000001\.tar is missing or has another size"):
        open_folder(folder)


def test_a_fault_of_the_disk_in_a_large_shard_is_no_bad_image(tmp_path: Path) -> None:
    tar = tmp_path / "large.tar"
    tar.touch()
    os.truncate(tar, 3 << 30)
    with pytest.raises(OSError, match="could not be read just now"):
        why_unreadable(Place(bytes(tar), 0, 1000), 1 << 30)


def test_other_arguments_and_foreign_files_are_refused(source: Index, tmp_path: Path, fortyfold: Fortyfold) -> None:
    folder = tmp_path / "train"
    sharded(source, folder, num_shards=2, tile="never")
    cases = [
        (("--shards", "3", "--tile", "never"), "already has other shards in it"),
        (("--shards", "1000"), "has only 64 images"),
        (("--part", "4/3"), "--part 4/3: give I/N with I from 1 to N"),
        (("--tile", "maybe"), "'maybe' is not one of"),
    ]
    for options, message in cases:
        code, _, err = fortyfold("data", "shard", source.folder, folder, *options)
        assert code == 2 and message in err and len(err.splitlines()) == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").touch()
    code, _, err = fortyfold("data", "shard", source.folder, tmp_path / "mine")
    assert code == 2 and "already has files in it (thesis.tex)" in err


def test_a_full_disk_is_found_before(source: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(UserError, match=r"needs about .* but its disk has 1\.0 KB free"):
        sharded(source, tmp_path / "train", tile="never")


def test_shards_can_be_sharded_anew(source: Index, shards: Index, tmp_path: Path) -> None:
    again = sharded(shards, tmp_path / "train", num_shards=2, tile="never")
    assert again.fingerprint == source.fingerprint
    assert len(shard_files(tmp_path / "train")) == 2


def test_how_many_shards() -> None:
    assert count_shards(10**9, 256 * 10**6, 10**4) == 4
    assert count_shards(10, 256, 10**4) == 1
    assert count_shards(10**9, 1, 7) == 7


def test_block_shuffle_reads_long_stretches_and_uses_every_sample_once(shards: Index) -> None:
    ids = np.concatenate([batch.ids for batch in epoch(shards, "block", read_ahead=2)])
    assert sorted(ids.tolist()) == list(range(len(shards)))
    assert [batch.ids.tolist() for batch in epoch(shards, "block")] == [
        batch.ids.tolist() for batch in epoch(shards, "block")
    ]
    storage = np.random.default_rng(0).permutation(3 * GROUP_IMAGES + 100)
    sequence = block_sequence(storage, 0, 0)
    used = mix_groups(sequence, 0, 0)
    assert sorted(used.tolist()) == sorted(storage.tolist())
    place = np.argsort(storage)  # where each sample lies
    steps = np.diff(place[sequence])
    assert (steps == 1).mean() > 1 - 2 / BLOCK_IMAGES  # neighbours are read one after another
    for start in range(0, len(used), GROUP_IMAGES):
        assert set(used[start : start + GROUP_IMAGES]) == set(sequence[start : start + GROUP_IMAGES])
    assert not np.array_equal(mix_groups(block_sequence(storage, 0, 1), 0, 1), used)


def test_stretches_cover_their_samples(shards: Index) -> None:
    assert shards.shards is not None
    storage = shards.shards.storage_order
    apart = stretches(shards.shards, np.concatenate([storage[:3], storage[9:12]]))
    assert len(apart) == 2 and apart.lengths.sum() < 20 * shards.shards.places.lengths.max()
    samples = storage[3:50]
    long = stretches(shards.shards, samples)
    assert len(long) <= 3
    images = shards.places(samples)
    for row in range(len(images)):
        assert any(
            long.which[i] == images.which[row]
            and long.offsets[i] <= images.offsets[row]
            and images.offsets[row] + images.lengths[row] <= long.offsets[i] + long.lengths[i]
            for i in range(len(long))
        )


def test_block_shuffle_needs_shards(source: Index) -> None:
    with pytest.raises(UserError, match="needs shards"):
        epoch(source, "block")


def test_a_shard_that_is_gone_or_short_makes_bad_images_not_a_crash(source: Index, tmp_path: Path) -> None:
    index = sharded(source, tmp_path / "train", tile="never")
    first, second, _ = sorted(index.folder.glob("*.tar"))
    first.unlink()
    os.truncate(second, 5000)
    bad = {sample for batch in epoch(index) for sample, _ in batch.bad}
    assert 20 < len(bad) < len(index)


def test_reading_ahead_changes_nothing(source: Index, shards: Index) -> None:
    for index in (source, shards):
        for one, other in zip(epoch(index), epoch(index, read_ahead=3, prefetch=1), strict=True):
            assert np.array_equal(one.images_nhwc, other.images_nhwc)
