"""Step records: fixed width, binary, one file a rank; forty ranks × a million steps are read in seconds.

A file is a 16-byte header (magic, version, bytes a record) and then records of STEP_DTYPE. It only grows
at its end, so a reader may follow it while it is written; a torn last record is size modulo record and is
passed over. A restart raises `attempt`: of a step that was done again, the last attempt's record holds.
"""

import os
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fortyfold.spec.errors import UserError

_COMMON = [
    ("step", "<i8"),  # 0 is the run's first
    ("end_time", "<f8"),  # Unix seconds, this host's clock
    ("attempt", "<u4"),  # 1 is the first start
    ("epoch", "<u4"),
    ("phase", "<u4"),
    ("images", "<u4"),  # of this rank, the unreadable ones not counted
    ("samples_digest", "<u4"),  # sum over the sample ids' hashes; adds up over ranks to the same at any world size
    ("data_wait_seconds", "<f4"),  # the loop stood still for its next batch
    ("step_seconds", "<f4"),  # from the end of the step before to the end of this one, data wait included
    ("loss", "<f4"),
    ("lr", "<f4"),
]
STEP_DTYPE = np.dtype(
    [
        *_COMMON,
        ("read_seconds", "<f4"),  # this and the next two: what the loader's threads spent on the batch, together
        ("decode_seconds", "<f4"),
        ("resize_seconds", "<f4"),  # resizing, and changing pixels (policy, jitter, erasing)
    ]
)
VERSION = 2
HEADER = struct.Struct("<8sII")
MAGIC = b"FFSTEPS\0"
DTYPES = {1: np.dtype([*_COMMON, ("reserved", "<u4")]), VERSION: STEP_DTYPE}  # every version that was ever written

Records = NDArray[np.void]


def open_for_append(path: Path) -> int:
    """A descriptor at the end of the last whole record; the header is written, a torn tail cut off."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    size = os.fstat(descriptor).st_size
    if size < HEADER.size + STEP_DTYPE.itemsize:  # no whole record: whatever version was begun
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, HEADER.pack(MAGIC, VERSION, STEP_DTYPE.itemsize), 0)
        whole = HEADER.size
    else:
        _, version, _ = HEADER.unpack(os.pread(descriptor, HEADER.size, 0))
        if version != VERSION:
            os.close(descriptor)
            raise UserError(f"{path} has step records of version {version}; start anew with --fresh")
        whole = size - (size - HEADER.size) % STEP_DTYPE.itemsize
        os.ftruncate(descriptor, whole)
    os.lseek(descriptor, whole, os.SEEK_SET)
    return descriptor


class StepReader:
    """Follows one rank's file: each `poll` gives the whole records that came since the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._dtype: np.dtype[Any] | None = None
        self._offset = HEADER.size

    def poll(self, at_most: int = sys.maxsize) -> Records:
        """The next records, `at_most` so many."""
        try:
            with self._path.open("rb") as file:
                num_bytes, dtype = self._whole_bytes(file, at_most)
                file.seek(self._offset)
                records = np.frombuffer(file.read(num_bytes), dtype)
        except (FileNotFoundError, NotADirectoryError):
            return np.empty(0, STEP_DTYPE)
        self._offset += records.nbytes
        return records

    def skip(self) -> None:
        """Pass over the whole records that are there, without reading them."""
        with suppress(FileNotFoundError, NotADirectoryError), self._path.open("rb") as file:
            self._offset += self._whole_bytes(file)[0]

    def _whole_bytes(self, file: BinaryIO, at_most: int = sys.maxsize) -> "tuple[int, np.dtype[Any]]":
        """How many bytes the whole records have that come next, and their format."""
        if self._dtype is None:
            self._dtype = _read_header(file.read(HEADER.size), self._path)
        if self._dtype is None:
            return 0, STEP_DTYPE
        num_records = max(0, os.fstat(file.fileno()).st_size - self._offset) // self._dtype.itemsize
        return min(num_records, at_most) * self._dtype.itemsize, self._dtype


def read_steps(path: Path) -> Records:
    """All records of one rank in the order of steps; of a replayed step only the last attempt's."""
    return last_attempts(StepReader(path).poll())


def last_attempts(records: Records) -> Records:
    """Drop each record that a later attempt did again."""
    order = np.lexsort((records["attempt"], records["step"]))
    ordered = records[order]
    last = np.ones(len(ordered), bool)
    last[:-1] = ordered["step"][1:] != ordered["step"][:-1]
    return ordered[last]


def standing(numbers: NDArray[Any]) -> NDArray[np.bool_]:
    """Which of these, in the order they were written, no later one undid by being the same or less."""
    if not len(numbers):
        return np.ones(0, bool)
    least_after = np.minimum.accumulate(numbers[::-1])[::-1][1:]
    return np.append(numbers[:-1] < least_after, True)


def _read_header(header: bytes, path: Path) -> "np.dtype[Any] | None":
    if len(header) < HEADER.size:
        return None  # the writer is about to write it
    magic, version, _ = HEADER.unpack(header)
    if magic != MAGIC:
        raise UserError(f"{path} holds no step records")
    if version not in DTYPES:
        raise UserError(f"{path} has step records of version {version}; this fortyfold reads up to {max(DTYPES)}")
    return DTYPES[version]
