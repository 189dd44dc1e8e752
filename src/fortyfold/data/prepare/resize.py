"""Copies of a data set whose images are smaller, and so are decoded several times faster.

Every file of the source is in every copy, under the same path: a copy has the source's `Index.fingerprint`, and
thus its sample ids, its order and its crops. What is small enough already, or cannot be decoded, is copied byte
for byte; the latter is also named in unreadable.txt. A split is `target/<side>/<split>/<class>/<file>`.

A file is written beside and renamed, so that its name says that it is whole: killed at any moment, the same
command goes on and ends with the same bytes. What a file of an earlier start is (made or copied) is told
without keeping a journal: one that has its source's size is looked at again.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fortyfold.data.cores import available_cores
from fortyfold.data.index import Index
from fortyfold.data.pillow_decode import BadImage
from fortyfold.data.prepare.shrink import shrink
from fortyfold.data.prepare.target import making
from fortyfold.data.prepare.work import Progress, ordered, printable, replace_file, require_space, settle
from fortyfold.data.splits import find_splits, open_folder
from fortyfold.spec.errors import UserError

RESIZE = "data resize"
UNREADABLE = "unreadable.txt"
MADE, KEPT, BAD = "made", "kept", "unreadable"
_SAMPLED = 64  # images that are made beforehand, for their sizes
_BLOCK_BYTES = 4096  # what a file takes on most disks is a multiple of this


@dataclass(frozen=True)
class ResizeSpec:
    """How the copies are to be: one of each shorter side, JPEGs of this quality."""

    sides: tuple[int, ...]
    quality: int = 90


@dataclass
class Counts:
    """What became of the images at one side."""

    counts: dict[str, int] = field(default_factory=lambda: {MADE: 0, KEPT: 0, BAD: 0})
    num_bytes: int = 0


@dataclass
class Resized:
    """What `make_resized` did: the whole of the copies, and how many images this start worked on."""

    num_images: int
    copies: dict[int, Counts]
    already_there: bool = False
    num_worked: int = 0
    source_bytes: int = 0
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # path below the copy's folder, reason


class _Image(NamedTuple):
    source: str
    below: str  # its path below the folder of a side


class _Outcome(NamedTuple):
    below: str
    source_bytes: int
    kinds: list[str]  # one a side, as the next
    copy_bytes: list[int]
    reason: str = ""  # why it is unreadable
    worked: bool = True


def make_resized(
    source: Path, target: Path, spec: ResizeSpec, num_threads: int = 0, progress: Progress | None = None
) -> Resized:
    """Make the copies of `source` (a root with train/ or val/, or a folder of class folders) in `target`."""
    num_threads = num_threads or available_cores()
    splits = {split: open_folder(folder) for split, folder in find_splits(source).items()}
    for index in splits.values():
        if index.shards is not None:
            raise UserError(
                f"{index.folder} has shards; resize the folders that they were made of, and shard the copies"
            )
    _refuse_inside(target, splits)
    result = Resized(sum(map(len, splits.values())), {side: Counts() for side in spec.sides})
    with making(target, RESIZE, _arguments(splits, spec)) as needed:
        if needed:
            require_space(target, _estimate(splits, spec, result.num_images, num_threads) - _bytes_below(target))
            _make_folders(target, splits, spec)
            work = partial(_resize, target, spec)
            for done, outcome in enumerate(ordered(work, _all(splits), num_threads), start=1):
                _count(result, outcome)
                if progress:
                    progress(done, result.num_images)
            if result.unreadable:
                replace_file(target / UNREADABLE, _lines(result.unreadable))
            settle()
    result.already_there = not needed
    return result


def _refuse_inside(target: Path, splits: dict[str, Index]) -> None:
    for index in splits.values():
        if target.resolve().is_relative_to(index.folder):
            raise UserError(f"{target} lies in {index.folder}, where it would count as a class; choose another folder")


def _arguments(splits: dict[str, Index], spec: ResizeSpec) -> dict[str, Any]:
    """What fixes every byte. Names are known whole; of the contents, the sizes of some files stand for all."""
    sampled_bytes = sum(_size(image.source) or 0 for image in _sample(splits))
    names = {split or "classes": index.fingerprint for split, index in splits.items()}
    return {"source": names, "sampled_bytes": sampled_bytes, "short_side": list(spec.sides), "quality": spec.quality}


def _all(splits: dict[str, Index]) -> Iterator[_Image]:
    """Every image, by sample id."""
    for split, index in splits.items():
        yield from (_image(split, index, sample) for sample in range(len(index)))


def _sample(splits: dict[str, Index]) -> Iterator[_Image]:
    """Some images of each split, spread evenly over it."""
    for split, index in splits.items():
        count = min(_SAMPLED, len(index))
        yield from (_image(split, index, number * len(index) // count) for number in range(count))


def _image(split: str, index: Index, sample: int) -> _Image:
    return _Image(index.path(sample), f"{split}/{index.relative_path(sample)}".lstrip("/"))


def _estimate(splits: dict[str, Index], spec: ResizeSpec, num_images: int, num_threads: int) -> int:
    """About how many bytes the copies will take: as some images' copies do, with the rest of their last blocks."""
    taken = [sum(map(_on_disk, outcome)) for outcome in ordered(partial(_sizes, spec), _sample(splits), num_threads)]
    return num_images * sum(taken) // len(taken)


def _sizes(spec: ResizeSpec, image: _Image) -> list[int]:
    blob, copies, _ = _shrunk(image, spec)
    return [len(blob if copy is None else copy) for copy in copies]


def _bytes_below(target: Path) -> int:
    files = (path for parent, _, names in os.walk(target) for path in (f"{parent}/{name}" for name in names))
    return sum(_on_disk(_size(path) or 0) for path in files)


def _on_disk(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _make_folders(target: Path, splits: dict[str, Index], spec: ResizeSpec) -> None:
    """Those of the classes too that have no image: they count as well."""
    for split, index in splits.items():
        parents = {index.relative_path(sample).rpartition("/")[0] for sample in range(len(index))}
        for side in spec.sides:
            for parent in sorted(parents | set(index.classes)):
                (target / str(side) / split / parent).mkdir(parents=True, exist_ok=True)


def _resize(target: Path, spec: ResizeSpec, image: _Image) -> _Outcome:
    """Make what is missing of an image's copies."""
    source_bytes = _size(image.source) or 0
    paths = [target / str(side) / image.below for side in spec.sides]
    found = [_size(path) for path in paths]
    sizes = [size for size in found if size and size != source_bytes]
    if len(sizes) == len(found):
        return _Outcome(image.below, source_bytes, [MADE] * len(found), sizes, worked=False)
    blob, copies, reason = _shrunk(image, spec)
    contents = [blob if copy is None else copy for copy in copies]
    for path, size, content in zip(paths, found, contents, strict=True):
        if size != len(content):
            replace_file(path, content)
    kinds = [BAD if reason else KEPT if copy is None else MADE for copy in copies]
    return _Outcome(image.below, source_bytes, kinds, [len(content) for content in contents], reason)


def _shrunk(image: _Image, spec: ResizeSpec) -> tuple[bytes, list[bytes | None], str]:
    """The file's bytes, its copies (None: the bytes as they are) and why it cannot be decoded, if so."""
    blob = b""
    try:
        blob = _read(image.source)
        return blob, shrink(blob, image.below, spec.sides, spec.quality), ""
    except BadImage as error:
        return blob, [None] * len(spec.sides), str(error)


def _read(path: str) -> bytes:
    """A name that leads nowhere is a bad image, whose copy is empty; any other fault ends the work, and may pass."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
            raise BadImage("not a file")
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise BadImage(error.strerror) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _size(path: str | Path) -> int | None:
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except FileNotFoundError:
        return None


def _count(result: Resized, outcome: _Outcome) -> None:
    result.num_worked += outcome.worked
    result.source_bytes += outcome.source_bytes
    for copy, kind, num_bytes in zip(result.copies.values(), outcome.kinds, outcome.copy_bytes, strict=True):
        copy.counts[kind] += 1
        copy.num_bytes += num_bytes
    if outcome.reason:
        result.unreadable.append((outcome.below, outcome.reason))


def _lines(unreadable: list[tuple[str, str]]) -> bytes:
    return "".join(f"{printable(below)}: {reason}\n" for below, reason in unreadable).encode()
