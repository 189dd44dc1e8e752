import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from archives import gzipped, member, python2_pickle, tar_of, write
from kills import contents, finish_despite_kills
from PIL import Image

from fortyfold.data.prepare.plain_pickle import ByteArray, PickleRefused, load_plain
from fortyfold.data.splits import open_split

Fortyfold = Callable[..., tuple[int, str, str]]
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
NUM = 30  # images a batch
META_PROTOCOL_0 = (
    b"(dp1\nS'num_cases_per_batch'\np2\nI10000\nsS'label_names'\np3\n(lp4\n"
    + b"".join(f"S'{name}'\np{5 + number}\na".encode() for number, name in enumerate(CLASSES))
    + b"sS'num_vis'\np15\nI3072\ns."
)


def batches() -> dict[str, tuple[Any, list[int]]]:
    rng = np.random.default_rng(0)
    return {
        name: (rng.integers(0, 256, (NUM, 3072), np.uint8), rng.permutation(np.arange(NUM) % 10).tolist())
        for name in NAMES
    }


def python_batch(data: Any, labels: list[int]) -> bytes:
    files = [f"thing_s_{number:06d}.png".encode() for number in range(len(labels))]
    return python2_pickle(
        {b"batch_label": b"training batch 1 of 5", b"labels": labels, b"data": data, b"filenames": files}
    )


def python_archive(**replaced: bytes) -> bytes:
    pickles = {name: python_batch(*batch) for name, batch in batches().items()}
    files = pickles | {"batches.meta": META_PROTOCOL_0, "readme.html": b"<a>"} | replaced
    return gzipped(tar_of(member(f"cifar-10-batches-py/{name}", data) for name, data in files.items()))


def binary_archive() -> bytes:
    files = {
        f"{name}.bin": np.concatenate([np.array(labels, np.uint8)[:, None], data], axis=1).tobytes()
        for name, (data, labels) in reversed(batches().items())
    }
    files["batches.meta.txt"] = ("\n".join(CLASSES) + "\n\n").encode()
    return gzipped(tar_of(member(f"cifar-10-batches-bin/{name}", data) for name, data in files.items()))


@pytest.fixture(autouse=True)
def _calm_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for everybody's writes proves nothing here."""
    monkeypatch.setattr(os, "sync", lambda: None)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return write(tmp_path / "cifar-10-python.tar.gz", python_archive())


def test_both_archives_give_the_same_lossless_images(archive: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    binary = write(tmp_path / "cifar-10-binary.tar.gz", binary_archive())
    code, out, err = fortyfold("data", "import", "cifar10", tmp_path / "one", archive, "--threads", 2)
    assert (code, err) == (0, "")
    assert "train 150 images, 10 classes" in out and "val   30 images, 10 classes" in out and "skipped" not in out
    assert fortyfold("data", "import", "cifar10", tmp_path / "two", binary)[0] == 0
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert len(one) == 181 and one.pop("made.json") != two.pop("made.json")
    assert one == two
    data, labels = batches()["data_batch_3"]
    with Image.open(tmp_path / "one/train" / CLASSES[labels[7]] / "00067.png") as image:
        assert np.array_equal(np.asarray(image).transpose(2, 0, 1).ravel(), data[7])
    assert len(open_split(tmp_path / "one", "train")) == 150
    assert "is there already" in fortyfold("data", "import", "cifar10", tmp_path / "one", archive)[1]


def test_it_survives_kills(archive: Path, tmp_path: Path) -> None:
    command = ("data", "import", "cifar10", tmp_path / "killed", archive, "--threads", 2)
    finish_despite_kills(4, *command, most_seconds=0.7)
    finish_despite_kills(0, *command[:3], tmp_path / "whole", *command[4:])
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_the_tests_pickles_are_real_ones() -> None:
    data, labels = batches()["data_batch_1"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy.core has another name by now
        loaded = pickle.loads(python_batch(data, labels), encoding="bytes")  # noqa: S301
        assert np.array_equal(loaded[b"data"], data) and loaded[b"labels"] == labels
        assert pickle.loads(META_PROTOCOL_0)["label_names"] == CLASSES  # noqa: S301
    plain = load_plain(python_batch(data, labels))
    assert plain[b"data"] == ByteArray((NUM, 3072), data.tobytes()) and plain[b"labels"] == labels
    assert load_plain(META_PROTOCOL_0)[b"num_vis"] == 3072


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", ["test_batch", "batches.meta"])
def test_a_malicious_pickle_is_refused_and_runs_nothing(
    tmp_path: Path, fortyfold: Fortyfold, name: str, protocol: int
) -> None:
    bomb = pickle.dumps({"data": Bomb(tmp_path / "ran")}, protocol)
    archive = write(tmp_path / "evil.tar.gz", python_archive(**{name: bomb}))
    code, _, err = fortyfold("data", "import", "cifar10", tmp_path / "made", archive)
    assert code == 2 and err.count("\n") == 1 and "evil.tar.gz is refused: it " in err
    assert "system" in err or "instruction" in err
    assert not (tmp_path / "ran").exists() and not (tmp_path / "made/train").exists()
    pickle.loads(bomb)  # noqa: S301 (it is a real one)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "pickled",
    [
        b"cnumpy\nndarray\n(tR.", b"cnumpy\ndtype\n(U\x02O8K\x00K\x01tR.", b"(S'x'\nios\nsystem\n.", b"cos\nsystem\n.",
        b"0.", b"u.", b"](K\x01", b"}(K\x01u.", b"}](K\x01es.", b"e.",
        b"K\x01K\x02a.", b"h\x05.", b"", b"\xff", b"K\x01K\x02b.", b"T\xff\xff\xff\x7fabc.", b"(K\x01t(b.",
    ],
)  # fmt: skip
def test_whatever_is_not_plain_is_refused(pickled: bytes) -> None:
    with pytest.raises(PickleRefused):
        load_plain(pickled)


@pytest.mark.parametrize(
    ("replaced", "line"),
    [
        ({"data_batch_2": python2_pickle({b"data": b"x", b"labels": [1]})}, "a batch has no array of pixels"),
        ({"data_batch_2": python_batch(np.zeros((2, 3072), np.uint8), [1])}, "pixels of the shape (2, 3072) for 1"),
        ({"data_batch_2": python_batch(np.zeros((1, 3072), np.uint8), [-1])}, "labels that are no small numbers"),
        ({"data_batch_2": python_batch(np.zeros((1, 3072), np.uint8), [10])}, "labels that batches.meta has no name"),
        ({"data_batch_2": python2_pickle({b"labels": [1]})}, "a pickle has no 'data' in it"),
        ({"batches.meta": python2_pickle({b"label_names": [b"../x"]})}, "are not plain, different words"),
        ({"batches.meta": python2_pickle({b"label_names": 7})}, "are not plain, different words"),
    ],
)
def test_a_batch_that_does_not_fit_is_one_line(
    tmp_path: Path, fortyfold: Fortyfold, replaced: dict[str, bytes], line: str
) -> None:
    archive = write(tmp_path / "c.tar.gz", python_archive(**replaced))
    code, _, err = fortyfold("data", "import", "cifar10", tmp_path / "made", archive)
    assert code == 2 and line in err and err.count("\n") == 1
    assert not (tmp_path / "made/train").exists()


def test_a_truncated_or_wrong_archive_writes_nothing(archive: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    whole = archive.read_bytes()
    command = ("data", "import", "cifar10", tmp_path / "made", archive)
    write(archive, whole[:-5])
    assert "is cut short" in fortyfold(*command)[2]
    write(archive, gzipped(tar_of([member("data_batch_1", b"x"), member("x", b"y")])))
    assert "has no batches.meta; give cifar-10-binary.tar.gz" in fortyfold(*command)[2]
    assert not (tmp_path / "made/train").exists()
    write(archive, whole)
    assert fortyfold(*command)[0] == 0
