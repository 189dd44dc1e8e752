"""Where images' bytes are: whole files of a folder, or stretches of tar files."""

import errno
import os
import stat
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

WHOLE = -1  # a length: to the end of the file


class Place(NamedTuple):
    """Where one image's bytes are."""

    file: bytes
    offset: int = 0
    length: int = WHOLE

    def read(self) -> bytes:
        """The image's bytes; fewer, or none, when the file has become shorter."""
        with open(self.file, "rb", opener=_open_without_waiting) as file:
            there = os.fstat(file.fileno()).st_size - self.offset
            if there <= 0:
                return b""
            file.seek(self.offset)
            return file.read(there if self.length == WHOLE else min(self.length, there))


@dataclass(frozen=True)
class Places:
    """Image i is the `lengths[i]` bytes at `offsets[i]` of `files[which[i]]`."""

    files: list[bytes]
    which: NDArray[np.int32]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, rows: "NDArray[Any] | list[int]") -> "Places":
        return Places(self.files, self.which[rows], self.offsets[rows], self.lengths[rows])

    def one(self, row: int) -> "Place":
        return Place(self.file(row), int(self.offsets[row]), int(self.lengths[row]))

    def file(self, row: int) -> bytes:
        return self.files[int(self.which[row])]

    def read(self, row: int) -> bytes:
        return self.one(row).read()


def whole_files(paths: list[bytes]) -> Places:
    count = len(paths)
    return Places(paths, np.arange(count, dtype=np.int32), np.zeros(count, np.int64), np.full(count, WHOLE, np.int64))


def _open_without_waiting(path: str, flags: int) -> int:
    """A pipe without a writer would be waited for, for ever."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, "not a file", path)
    return descriptor


def why_unreadable(place: Place, max_bytes: int) -> str:
    """Why an image could not be read; raises what may pass, since leaving the image out would not be right then."""
    try:
        about = os.stat(place.file)  # noqa: PTH116
        if not stat.S_ISREG(about.st_mode):
            return "not a file"
        num_bytes = about.st_size if place.length == WHOLE else place.length
        if num_bytes > max_bytes:
            return f"the file has {num_bytes} bytes, more than {max_bytes}"
        os.close(os.open(place.file, os.O_RDONLY))
    except (FileNotFoundError, PermissionError) as error:
        return error.strerror or type(error).__name__
    raise OSError(errno.EIO, "could not be read just now", os.fsdecode(place.file))
