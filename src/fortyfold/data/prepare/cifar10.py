"""CIFAR-10 out of either of its archives (binary or Python), as lossless PNG files, the same for both.

The whole archive (180 MB unpacked) is read and gzip's checksum seen before the first image is written.
Training images are numbered 00000…49999 in the batches' order, those of the test batch (val/) likewise.
"""

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fortyfold.data.cores import available_cores
from fortyfold.data.prepare.archive import Source, files
from fortyfold.data.prepare.image_folder import Show, SplitFolder, Tally, check_exact, num_files
from fortyfold.data.prepare.origin import Origin, import_archive
from fortyfold.data.prepare.plain_pickle import ByteArray, PickleRefused, load_plain
from fortyfold.data.prepare.work import ordered, replace_file, require_space, settle
from fortyfold.spec.errors import UserError

BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "val": ["test_batch"]}
_NAME = re.compile(r"(?:.*/)?((?:data_batch_[1-5]|test_batch)(?:\.bin)?|batches\.meta(?:\.txt)?)")
_BESIDE = re.compile(r"(?:.*/)?readme\.html")
_CLASS = re.compile(r"[a-z][a-z0-9_-]*")
_SIDE = 32
_PIXEL_BYTES = 3 * _SIDE * _SIDE
_MOST_MEMBER_BYTES = 64 << 20
_FILE_BYTES = 4096  # on the disk; a PNG of 32 × 32 pixels fills one block

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Cifar10:
    """Everything in the archive: planar pixels (n, 3, 32, 32) and labels of each split."""

    classes: list[str]
    images: dict[str, Pixels]
    labels: dict[str, Pixels]


def import_cifar10(folder: Path, origin: Origin, num_threads: int, show: Show) -> Tally | None:
    """Make `folder`/train and /val; None if they are there already."""
    threads = num_threads or available_cores()
    return import_archive(folder, "data import cifar10", origin, lambda: _fill(folder, origin, threads, show))


def _fill(folder: Path, origin: Origin, num_threads: int, show: Show) -> Tally:
    tally = Tally()
    path = origin.fetch(folder, lambda archive_bytes: max(0, 2 * archive_bytes - _FILE_BYTES * num_files(folder)), show)
    data = read_archive(path, tally.skipped)
    total = sum(map(len, data.labels.values()))
    require_space(folder, _FILE_BYTES * max(0, total - num_files(folder)))
    with show("importing CIFAR-10") as progress:
        for _ in ordered(_write_png, _missing_images(folder, data, tally), num_threads, ahead=64):
            progress(tally.images.total() * _PIXEL_BYTES, total * _PIXEL_BYTES)
    check_exact(folder, tally)
    settle()
    return tally


def _missing_images(folder: Path, data: Cifar10, tally: Tally) -> Iterator[tuple[Path, Pixels]]:
    for split, images in data.images.items():
        place = SplitFolder(folder, split)
        for number, (image, label) in enumerate(zip(images, data.labels[split], strict=True)):
            name = data.classes[label]
            path, size_there = place.locate(name, f"{number:05d}.png")
            tally.images[split, name] += 1
            if size_there:
                tally.num_kept += 1
            else:
                yield path, image


def _write_png(item: tuple[Path, Pixels]) -> None:
    path, image_chw = item
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image_chw.transpose(1, 2, 0))).save(file, "PNG")
    replace_file(path, file.getvalue())


def read_archive(path: Path, skipped: list[str]) -> Cifar10:
    """The data set; a UserError for anything that is not whole."""
    found = _read_members(path, skipped)
    is_binary = "test_batch.bin" in found
    suffix = ".bin" if is_binary else ""
    read = _read_binary if is_binary else _read_pickled
    meta = f"batches.meta{'.txt' if is_binary else ''}"
    for name in (meta, *(name + suffix for names in BATCHES.values() for name in names)):
        if name not in found:
            raise UserError(f"{path} has no {name}; give cifar-10-binary.tar.gz or cifar-10-python.tar.gz")
    try:
        classes = _class_names(found[meta], is_binary)
        splits = {split: [read(found[name + suffix]) for name in names] for split, names in BATCHES.items()}
    except (PickleRefused, UserError) as error:
        raise UserError(f"{path} is refused: {error}") from None
    images = {split: np.concatenate([batch[0] for batch in batches]) for split, batches in splits.items()}
    labels = {split: np.concatenate([batch[1] for batch in batches]) for split, batches in splits.items()}
    if max(int(of_split.max(initial=0)) for of_split in labels.values()) >= len(classes):
        raise UserError(f"{path} has labels that {meta} has no name for; get it again")
    return Cifar10(classes, images, labels)


def _read_members(path: Path, skipped: list[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with Source(path) as source:
        for member in files(source, skipped):
            match = _NAME.fullmatch(member.name)
            if match and match[1] not in found and member.size <= _MOST_MEMBER_BYTES:
                found[match[1]] = source.read(member.size)
            elif not _BESIDE.fullmatch(member.name):
                why = "a second one of this name" if match and match[1] in found else "not a batch of this set"
                skipped.append(f"{member.name!r} ({why})")
    return found


def _class_names(meta: bytes, is_binary: bool) -> list[str]:
    names = meta.split() if is_binary else _of(load_plain(meta), "label_names")
    names = names if isinstance(names, list) else [names]
    texts = [name.decode("latin-1") if isinstance(name, bytes) else str(name) for name in names]
    if len(set(texts)) != len(texts) or not all(map(_CLASS.fullmatch, texts)):
        raise UserError(f"its class names {texts[:12]} are not plain, different words")
    return texts


def _read_binary(batch: bytes) -> tuple[Pixels, Pixels]:
    """Records of a label's byte and 3072 of red, green and blue planes."""
    num_bytes = 1 + _PIXEL_BYTES
    if len(batch) % num_bytes:
        raise UserError(f"a batch is not made of records of {num_bytes} bytes")
    records = np.frombuffer(batch, np.uint8).reshape(-1, num_bytes)
    return records[:, 1:].reshape(-1, 3, _SIDE, _SIDE), records[:, 0]


def _read_pickled(batch: bytes) -> tuple[Pixels, Pixels]:
    content = load_plain(batch)
    data, labels = _of(content, "data"), _of(content, "labels")
    if not isinstance(data, ByteArray) or not isinstance(labels, list):
        raise UserError("a batch has no array of pixels, or no list of labels")
    shape = (len(labels), _PIXEL_BYTES)
    if data.shape != shape or len(data.data) != shape[0] * shape[1]:
        raise UserError(f"a batch has pixels of the shape {data.shape} for {len(labels)} labels")
    if not all(isinstance(label, int) and 0 <= label < 256 for label in labels):
        raise UserError("a batch has labels that are no small numbers")
    return np.frombuffer(data.data, np.uint8).reshape(-1, 3, _SIDE, _SIDE), np.array(labels, np.uint8)


def _of(content: Any, key: str) -> Any:
    """An entry of a Python 2 dict, whose keys are bytes."""
    if not isinstance(content, dict) or not (key.encode() in content or key in content):
        raise UserError(f"a pickle has no {key!r} in it")
    return content.get(key.encode(), content.get(key))
