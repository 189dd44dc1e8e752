"""Which images there are: the samples of one split, their labels and class names, and where their bytes are.

An index is the same whether the split is a folder of class folders (data/folders.py) or shards
(data/shards.py): the same sample ids, names, labels, and thus the same order and the same fingerprint.
One of somebody's own data set object (data/own.py) has items instead of names and places.
"""

import hashlib
import json
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fortyfold.data.items import Items
from fortyfold.data.order import Ids
from fortyfold.data.places import Places, whole_files
from fortyfold.spec.errors import UserError
from fortyfold.spec.plugin import nearest


@dataclass(frozen=True)
class Shards:
    """Where a sharded split keeps its images: a row a sample, in the order of sample ids."""

    places: Places
    checksums: NDArray[np.uint32]  # CRC-32 of each image's bytes
    headers: NDArray[np.int32]  # (width, height, EXIF orientation); 0 where the image could not be read

    @cached_property
    def storage_order(self) -> Ids:
        """The samples as they lie in the files, one after another."""
        return np.lexsort((self.places.offsets, self.places.which))


@dataclass(frozen=True)
class Index:
    """The images of one split. Sample ids are 0…len-1."""

    folder: Path
    classes: tuple[str, ...]
    labels: NDArray[np.int32]  # -1: the item will tell
    names: bytes  # UTF-8 (surrogateescape) paths below the folder of class folders, one after another
    name_ends: NDArray[np.int64]
    shards: Shards | None = None
    items: Items | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def storage(self) -> Path:
        """The folder that is read, which of a staged split is not the one it is named by."""
        return self.folder if self.shards is None else Path(os.fsdecode(self.shards.places.files[0])).parent

    def relative_path(self, sample: int) -> str:
        return os.fsdecode(self._name(sample))

    def path(self, sample: int) -> str:
        """Where a user finds the image."""
        if self.items is not None:
            return f"{self.relative_path(sample)} of {self.folder}"
        if self.shards is None:
            return os.fsdecode(self._folder_bytes + self._name(sample))
        return f"{self.relative_path(sample)} in {os.fsdecode(self.shards.places.file(sample))}"

    def places(self, samples: Ids) -> Places:
        """Where the samples' bytes are; items have none."""
        if self.items is not None:
            return whole_files([])
        if self.shards is not None:
            return self.shards.places[samples]
        folder, ends, names = self._folder_bytes, self.name_ends, self.names
        starts = np.where(samples > 0, ends[samples - 1], 0).tolist()
        return whole_files([folder + names[a:b] for a, b in zip(starts, ends[samples].tolist(), strict=True)])

    def _name(self, sample: int) -> bytes:
        if self.items is not None:
            return f"item {sample}".encode()
        start = int(self.name_ends[sample - 1]) if sample else 0
        return self.names[start : int(self.name_ends[sample])]

    @cached_property
    def _folder_bytes(self) -> bytes:
        return os.fsencode(self.folder) + b"/"

    @cached_property
    def known_headers(self) -> NDArray[np.int32]:
        """(width, height, orientation) of each image as far as it was read; 0 before. Filled in by the reader."""
        return np.zeros((len(self), 3), np.int32) if self.shards is None else self.shards.headers.copy()

    @cached_property
    def fingerprint(self) -> str:
        """Tells whether two indexes number the same files alike, wherever and however they are stored."""
        content = hashlib.sha256(json.dumps(self.classes).encode())
        for part in (self.name_ends.tobytes(), self.names, self.labels.tobytes()):
            content.update(part)
        return content.hexdigest()[:16]


def with_classes(index: Index, classes: tuple[str, ...]) -> Index:
    """`index` labelled by `classes` (the training set's); class folders 0…n-1 count as positions in it."""
    if index.classes == classes:
        return index
    if index.items is not None:
        return _with_classes_of_items(index, index.items, classes)
    known = {name: label for label, name in enumerate(classes)}
    if set(index.classes) <= known.keys():
        new_labels = [known[name] for name in index.classes]
    elif are_positions(index.classes, classes):
        new_labels = [int(name) for name in index.classes]
    else:
        name = next(name for name in index.classes if name not in known)
        raise UserError(f"{index.folder} has the class {name!r}, which the training set lacks{nearest(name, known)}")
    return replace(index, classes=classes, labels=np.array(new_labels, np.int32)[index.labels])


def _with_classes_of_items(index: Index, items: Items, classes: tuple[str, ...]) -> Index:
    """Items tell their labels as they are loaded, so their numbers must mean the same classes."""
    if not are_positions(index.classes, classes):
        raise UserError(f"{index.folder} has other classes than the training set; labels must count the same ones")
    return replace(index, classes=classes, items=replace(items, num_classes=len(classes)))


def are_positions(names: tuple[str, ...], classes: tuple[str, ...]) -> bool:
    """Whether the class folders `names` count the training set's classes (whose own names are no numbers)."""
    in_range = all(name.isdecimal() and int(name) < len(classes) for name in names)
    return in_range and not any(name.isdecimal() for name in classes)
