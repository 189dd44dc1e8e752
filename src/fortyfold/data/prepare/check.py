"""Looks at a data set before days are spent on it, and changes nothing.

A check is a function of the data, the findings it adds to, and a progress report; CHECKS lists them. Memory is 24
bytes an image beside the index, and a few words a finding. Duplicates are exact (same size, same SHA-256), but
only files that also begin and end alike are hashed: a large set has few sizes that occur once, and would be read
whole.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import groupby, pairwise
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fortyfold.data import decode
from fortyfold.data.cores import available_cores
from fortyfold.data.folders import is_image, walk_class
from fortyfold.data.index import Index, Shards, are_positions
from fortyfold.data.places import Place, Places
from fortyfold.data.prepare.file_facts import FileFacts, look_at
from fortyfold.data.prepare.findings import Findings
from fortyfold.data.prepare.shrink import FORMAT_OF_SUFFIX, GREY_MODES
from fortyfold.data.prepare.work import Progress, ordered, printable
from fortyfold.data.splits import find_splits, open_folder

_CHUNK = 64  # files a thread takes at once: one alone is too little work
_DECODED_PX = 64
IMAGENET = {"train": 1_281_167, "val": 50_000}
IMAGENET_CLASSES = 1000

_FACTS = np.dtype([("bytes", np.int64), ("ends", np.uint64), ("size", np.int32, 2)])


class DataSet:
    """The splits of a data set, their images numbered through; what the checks learn of each stays here."""

    def __init__(self, root: Path, num_threads: int = 0) -> None:
        self.num_threads = num_threads or available_cores()
        self.splits = {split: open_folder(folder) for split, folder in find_splits(root).items()}
        self.starts = dict(zip(self.splits, np.cumsum([0, *map(len, self.splits.values())]).tolist(), strict=False))

    def __len__(self) -> int:
        return sum(map(len, self.splits.values()))

    @cached_property
    def facts(self) -> NDArray[np.void]:
        """Size in bytes and pixels and a hash of both ends, of each image; 0 pixels where it is unreadable."""
        return np.zeros(len(self), _FACTS)

    def split_of(self, sample: int) -> str:
        return max(self.splits, key=lambda split: (self.starts[split] <= sample, self.starts[split]))

    def place(self, sample: int) -> Place:
        split = self.split_of(sample)
        return self.splits[split].places(np.array([sample - self.starts[split]])).one(0)

    def name(self, sample: int) -> str:
        """The path below the root, in one printable line."""
        split = self.split_of(sample)
        return named(split, self.splits[split].relative_path(sample - self.starts[split]))


def named(split: str, below: str) -> str:
    return printable(f"{split}/{below}".lstrip("/"))


def check_classes(data: DataSet, findings: Findings, progress: Progress) -> None:
    """Classes that one split has and the other lacks, and such without an image."""
    for split, index in data.splits.items():
        for label in np.flatnonzero(np.bincount(index.labels, minlength=len(index.classes)) == 0).tolist():
            findings.add_name("empty_classes", named(split, index.classes[label]))
    if data.splits.keys() >= {"train", "val"}:
        train, val = data.splits["train"].classes, data.splits["val"].classes
        if not set(val) <= set(train) and are_positions(val, train):
            val = tuple(train[int(name)] for name in val)
        for kind, ours, theirs in (("only_in_val", val, train), ("only_in_train", train, val)):
            for name in sorted(set(ours) - set(theirs)):
                findings.add_name(kind, printable(name))


def check_folders(data: DataSet, findings: Findings, progress: Progress) -> None:
    """Files that are not seen: no images by their names, or images beside the class folders."""
    done, total = 0, sum(len(index.classes) for index in data.splits.values() if index.shards is None)
    for split, index in data.splits.items():
        if index.shards is not None:
            continue
        for path in sorted(index.folder.iterdir()):
            if is_image(path.name) and not path.is_dir():
                findings.add_name("outside", named(split, path.name))
        for others in ordered(partial(_not_images, index), index.classes, data.num_threads):
            for other in others:
                findings.add_name("not_images", named(split, other))
            progress(done := done + 1, total)


def _not_images(index: Index, name: str) -> list[str]:
    walk = walk_class(index.folder, name)
    return sorted(f"{folder}/{file}" for folder, _, files in walk for file in files if not is_image(file))


def check_files(data: DataSet, findings: Findings, progress: Progress) -> None:
    """Headers, formats, colours and ends of all files."""

    def look(samples: range) -> list[FileFacts]:
        return [look_at(data.place(sample)) for sample in samples]

    chunks = _chunks(len(data))
    for samples, facts in zip(chunks, ordered(look, chunks, data.num_threads), strict=True):
        for sample, about in zip(samples, facts, strict=True):
            data.facts[sample] = (about.num_bytes, about.ends_hash, (about.width, about.height))
            _judge(findings, sample, about, data.name(sample))
        progress(samples.stop, len(data))


def _chunks(num_samples: int) -> list[range]:
    return [range(start, min(start + _CHUNK, num_samples)) for start in range(0, num_samples, _CHUNK)]


def _judge(findings: Findings, sample: int, about: FileFacts, name: str) -> None:
    if about.reason:
        findings.add_sample("unreadable", sample, about.reason)
        return
    if about.truncated:
        findings.add_sample("truncated", sample)
    if about.format != FORMAT_OF_SUFFIX[PurePath(name).suffix.lower()]:
        findings.add_sample("other_format", sample, about.format)
    if about.mode in ("CMYK", "YCCK"):
        findings.add_sample("cmyk", sample, about.mode)
    if about.mode in GREY_MODES or about.mode.startswith("I"):
        findings.add_sample("grey", sample)


def check_duplicates(data: DataSet, findings: Findings, progress: Progress) -> None:
    """Files with the same content, in a split and over both; needs what `check_files` learnt."""
    suspects = _alike(data.facts)
    twins: list[list[int]] = []
    done = 0

    def hashed(sample: int) -> tuple[int, bytes]:
        return sample, _sha256(data.place(sample))

    hashes = ordered(hashed, suspects.tolist(), data.num_threads)
    for _, group in groupby(hashes, key=lambda item: data.facts[item[0]].tolist()[:2]):
        same: dict[bytes, list[int]] = {}
        for sample, digest in group:
            same.setdefault(digest, []).append(sample)
            progress(done := done + 1, len(suspects))
        twins += [sorted(samples) for digest, samples in same.items() if digest and len(samples) > 1]
    for samples in sorted(twins):
        _name_twins(data, findings, samples)


def _alike(facts: NDArray[np.void]) -> NDArray[np.int64]:
    """Samples whose size and ends others have as well, such together; empty files are no twins."""
    order = np.lexsort((facts["ends"], facts["bytes"]))
    num_bytes, ends = facts["bytes"][order], facts["ends"][order]
    like_next = (num_bytes[:-1] == num_bytes[1:]) & (ends[:-1] == ends[1:])
    alike = np.append(like_next, False) | np.append(False, like_next)
    return np.asarray(order[alike & (num_bytes > 0)], np.int64)


def _sha256(place: Place) -> bytes:
    """Empty when the image cannot be read (any more)."""
    try:
        return hashlib.sha256(place.read()).digest()
    except OSError:
        return b""


def _name_twins(data: DataSet, findings: Findings, samples: list[int]) -> None:
    """`samples`, by id and thus train first, have the same content."""
    per_split = [list(group) for _, group in groupby(samples, key=data.split_of)]
    for group in per_split:
        for sample in group[1:]:
            findings.add_sample("duplicates", sample, group[0])
    for group, other in pairwise(per_split):
        for sample in other:
            findings.add_sample("leaks", sample, group[0])


def check_pixels(data: DataSet, findings: Findings, progress: Progress) -> None:
    """Decode every image whose header can be read, as a training does; needs what `check_files` learnt."""
    for samples in _chunks(len(data)):
        readable = [sample for sample in samples if data.facts["size"][sample].all()]
        boxes = np.zeros((len(readable), 4), np.int64)
        boxes[:, 2:] = data.facts["size"][readable]
        out = np.empty((len(readable), _DECODED_PX, _DECODED_PX, 3), np.uint8)
        each = [data.place(sample) for sample in readable]
        places = Places([place.file for place in each], *_columns(each))
        reasons, _ = decode.decode_crops(places, boxes, np.zeros(len(readable), np.uint8), out, data.num_threads)
        for row, reason in sorted(reasons.items()):
            findings.add_sample("undecodable", readable[row], reason)
        progress(samples.stop, len(data))


def _columns(places: list[Place]) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    count = len(places)
    offsets, lengths = np.array([place[1:] for place in places], np.int64).reshape(count, 2).T.copy()
    return np.arange(count, dtype=np.int32), offsets, lengths


def check_checksums(data: DataSet, findings: Findings, progress: Progress) -> None:
    """Every image of shards against the CRC-32 that their index has, in the order in which the images lie."""
    done, total = 0, sum(len(index) for index in data.splits.values() if index.shards)
    for split, index in data.splits.items():
        if index.shards is None:
            continue
        wrong = partial(_is_altered, index.shards)
        order = index.shards.storage_order.tolist()
        for sample, altered in zip(order, ordered(wrong, order, data.num_threads), strict=True):
            if altered:
                findings.add_sample("altered", data.starts[split] + sample)
            progress(done := done + 1, total)


def _is_altered(shards: Shards, sample: int) -> bool:
    try:
        return zlib.crc32(shards.places.read(sample)) != int(shards.checksums[sample])
    except OSError:
        return True


Check = Callable[[DataSet, Findings, Progress], None]
CHECKS: dict[str, Check] = {
    "comparing classes": check_classes,
    "looking into folders": check_folders,
    "looking at files": check_files,
    "verifying checksums": check_checksums,
    "looking for duplicates": check_duplicates,
    "decoding images": check_pixels,
}
SLOW = {"decoding images"}  # only when asked for


def describe_splits(data: DataSet) -> dict[str, dict[str, Any]]:
    """Per split its folder, classes and images."""
    return {
        split or "classes": {"folder": str(index.folder), "classes": len(index.classes), "images": len(index)}
        for split, index in data.splits.items()
    }


def imagenet_lines(data: DataSet) -> Iterator[str]:
    """What is known of ImageNet, when this seems to be it."""
    for split, index in data.splits.items():
        expected = IMAGENET.get(split, 0)
        if len(index.classes) != IMAGENET_CLASSES or abs(len(index) - expected) > expected // 10:
            continue
        if len(index) != expected:
            yield f"ImageNet (ILSVRC 2012) has {expected} images in {split}, this one {len(index)}"
        elif split == "train":
            yield f"{expected} images in train, as ImageNet has; of those, one PNG and 22 CMYK JPEGs are known"
        else:
            yield f"{expected} images in {split}, as ImageNet has"
