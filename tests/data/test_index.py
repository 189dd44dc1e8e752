import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fortyfold.data.folders as folders_module
from fortyfold.data.folders import cache_folder
from fortyfold.data.index import with_classes
from fortyfold.data.splits import find_split, open_folder, open_split
from fortyfold.spec.errors import UserError


def make_tree(root: Path, files: list[str]) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(b"x")
    return root


def age(folder: Path, seconds: float = 10) -> None:
    """As if nothing had changed in the tree for a while."""
    then = time.time() - seconds
    for parent, _, _ in os.walk(folder):
        os.utime(parent, (then, then))


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were scanned, not taken from the cache."""
    seen: list[Path] = []
    scan: Callable[..., object] = folders_module._scan

    def counting(folder: Path, progress: object) -> object:
        seen.append(folder)
        return scan(folder, progress)

    monkeypatch.setattr(folders_module, "_scan", counting)
    return seen


@pytest.mark.parametrize(
    ("layout", "val"),
    [("", "val"), ("", "validation"), ("Data/CLS-LOC", "val"), ("ILSVRC/Data/CLS-LOC", "val")],
)
def test_the_usual_layouts_are_found(tmp_path: Path, layout: str, val: str) -> None:
    root = make_tree(tmp_path, [f"{layout}/train/a/1.jpg".lstrip("/"), f"{layout}/{val}/a/1.jpg".lstrip("/")])
    assert find_split(root, "train") == root / layout / "train"
    assert find_split(root, "val") == root / layout / val


def test_samples_are_numbered_as_torchvision_numbers_them(tmp_path: Path) -> None:
    names = ["b/2.jpg", "b/10.JPEG", "b/z/1.png", "b/a/9.jpg", "B/x.jpg", "a b/ü.jpg", "a b/.hidden/4.jpg", "c/é/1.jpg"]
    make_tree(tmp_path, [*names, "b/readme.txt", "note.jpg"])
    import fortyfold.models.timm_import  # noqa: F401  (torchvision beside a CPU build of torch)

    from torchvision.datasets import ImageFolder  # isort: skip

    theirs = ImageFolder(str(tmp_path), allow_empty=True)
    ours = open_folder(tmp_path)
    assert list(ours.classes) == theirs.classes
    assert [(ours.path(i), int(ours.labels[i])) for i in range(len(ours))] == theirs.samples


def test_class_folders_with_numbers_are_in_numeric_order(tmp_path: Path) -> None:
    index = open_folder(make_tree(tmp_path, [f"{label}/x.jpg" for label in range(12)]))
    assert index.classes == tuple(map(str, range(12)))
    assert index.relative_path(11) == "11/x.jpg"


def test_a_second_opening_takes_the_cache_and_a_change_is_noticed(tmp_path: Path, scans: list[Path]) -> None:
    root = make_tree(tmp_path, ["a/1.jpg", "a/2.jpg", "b/deep/3.jpg"])
    age(root)
    first = open_folder(root)
    again = open_folder(root)
    assert len(scans) == 1
    assert (again.classes, again.fingerprint, again.path(2)) == (first.classes, first.fingerprint, first.path(2))
    assert np.array_equal(again.labels, first.labels)
    (root / "b/deep/4.jpg").write_bytes(b"x")
    assert len(open_folder(root)) == 4
    (root / "a/1.jpg").rename(root / "a/0.jpg")
    assert open_folder(root).relative_path(0) == "a/0.jpg"
    (root / "c").mkdir()
    assert open_folder(root).classes == ("a", "b", "c")
    assert len(scans) == 4
    age(root)
    open_folder(root), open_folder(root)
    assert len(scans) == 5
    open_folder(root, fresh=True)
    assert len(scans) == 6


def test_a_folder_that_just_changed_is_not_cached(tmp_path: Path, scans: list[Path]) -> None:
    root = make_tree(tmp_path, ["a/1.jpg"])
    open_folder(root), open_folder(root)
    assert len(scans) == 2


def test_a_damaged_cache_is_scanned_again(tmp_path: Path, scans: list[Path]) -> None:
    root = make_tree(tmp_path / "damaged", ["a/1.jpg"])
    age(root)
    before = set(cache_folder().iterdir())
    open_folder(root)
    (cache,) = set(cache_folder().iterdir()) - before
    for damage in (b"", b"{}\n", cache.read_bytes()[:-1], cache.read_bytes()[:-3] + b"abc", b"\xff\n"):
        cache.write_bytes(damage)
        assert len(open_folder(root)) == 1
    assert len(scans) == 6


def test_a_link_back_to_a_parent_ends(tmp_path: Path) -> None:
    root = make_tree(tmp_path, ["a/1.jpg"])
    (root / "a/loop").symlink_to(root / "a")
    assert len(open_folder(root)) == 1


def test_validation_takes_the_training_sets_labels(tmp_path: Path) -> None:
    train = open_folder(make_tree(tmp_path / "t", ["a/1.jpg", "b/1.jpg", "c/1.jpg"]))
    some = open_folder(make_tree(tmp_path / "v", ["c/1.jpg", "a/1.jpg"]))
    assert with_classes(some, train.classes).labels.tolist() == [0, 2]
    numbered = open_folder(make_tree(tmp_path / "n", ["0/1.jpg", "2/1.jpg"]))
    assert with_classes(numbered, train.classes).labels.tolist() == [0, 2]
    other = open_folder(make_tree(tmp_path / "o", ["a/1.jpg", "bb/1.jpg"]))
    with pytest.raises(UserError, match="has the class 'bb', which the training set lacks; did you mean b"):
        with_classes(other, train.classes)


def test_numbers_are_no_positions_when_the_classes_are_numbers_themselves(tmp_path: Path) -> None:
    train = open_folder(make_tree(tmp_path / "t", [f"{label}/1.jpg" for label in (1, 2, 3)]))
    shifted = open_folder(make_tree(tmp_path / "v", [f"{label}/1.jpg" for label in (0, 1, 2)]))
    with pytest.raises(UserError, match="has the class '0', which the training set lacks"):
        with_classes(shifted, train.classes)


def test_a_class_folder_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_tree(tmp_path, ["a/1.jpg", "b/1.jpg"])
    scandir: Callable[..., object] = os.scandir

    def refusing(path: str) -> object:
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(UserError, match=r"cannot read .*/b: Permission denied"):
        open_folder(root)


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ([], "no data folder"),
        (["x/1.jpg"], "has no train/ "),
        (["train/1.jpg"], "has images but no class folders; sort them into a folder a class"),
        (["train/a/x.txt"], "has class folders but no image in them"),
        (["train/x.txt"], "has no class folders"),
    ],
)
def test_a_wrong_folder_says_what_is_missing(tmp_path: Path, files: list[str], line: str) -> None:
    make_tree(tmp_path / "data", files)
    with pytest.raises(UserError, match=line):
        open_split(tmp_path / "data", "train")


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FORTYFOLD_CACHE", str(tmp_path / "file" / "cache"))
    root = make_tree(tmp_path / "data", ["a/1.jpg"])
    age(root)
    assert len(open_folder(root)) == 1
