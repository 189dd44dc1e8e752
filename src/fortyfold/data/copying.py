"""Files copied with their checksum, several at once, each whole or not at all.

A file is written beside, compared with its SHA-256 while it goes by, fsynced and renamed: one with its final name
and size is whole. The threads do the copying; the caller's thread hears how far they are a few times a second, and
stops them by raising. What was not whole by then is taken away.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fortyfold.spec.errors import RunFailed, UserError

BLOCK_BYTES = 8 << 20  # large enough for a network disk to read ahead
_TELL_SECONDS = 0.2

Result = TypeVar("Result")
Moved = Callable[[int], None]  # so many bytes are done in all


@dataclass(frozen=True)
class Copy:
    source: Path
    target: Path
    num_bytes: int
    sha256: str

    @property
    def part(self) -> Path:
        return self.target.with_name(f".{self.target.name}.part")

    def is_there(self) -> bool:
        return _size(self.target) == self.num_bytes

    def bytes_there(self) -> int:
        """Also of one that is being copied."""
        return self.num_bytes if self.is_there() else _size(self.part) or 0


def copy_all(copies: Iterable[Copy], num_streams: int, moved: Moved) -> None:
    """Copy each; the first that fails ends all."""
    _in_streams(_copy, list(copies), num_streams, moved)


def find_damaged(copies: list[Copy], num_streams: int, moved: Moved) -> list[Copy]:
    """Read the targets again; gives those whose content is not theirs."""
    whole = _in_streams(_is_whole, copies, num_streams, moved)
    return [copy for copy, is_whole in zip(copies, whole, strict=True) if not is_whole]


class _Cancelled(Exception):
    """The caller wants no more."""


class _Tally:
    """Counts the bytes of all streams, and tells them when to end."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.cancelled = False
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
        if self.cancelled:
            raise _Cancelled


def _in_streams(
    work: Callable[[Copy, _Tally], Result], copies: list[Copy], num_streams: int, moved: Moved
) -> list[Result]:
    tally = _Tally()
    pool = ThreadPoolExecutor(num_streams, thread_name_prefix="stream")
    try:
        futures = [pool.submit(work, copy, tally) for copy in copies]
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, _TELL_SECONDS, FIRST_EXCEPTION)
            for future in done:
                future.result()
            moved(tally.num_bytes)
        return [future.result() for future in futures]
    finally:
        tally.cancelled = True
        pool.shutdown(wait=True, cancel_futures=True)


def _copy(copy: Copy, tally: _Tally) -> None:
    if _size(copy.source) != copy.num_bytes:
        raise UserError(f"{copy.source} is missing or has another size than its index says; {_MEND}")
    try:
        with copy.part.open("wb") as part:
            digest = _read(copy.source, tally, part.write)
            if digest != copy.sha256:
                raise UserError(f"{copy.source} does not match its checksum: it is damaged, or just changed; {_MEND}")
            part.flush()
            os.fsync(part.fileno())
        copy.part.replace(copy.target)
    except OSError as error:
        copy.part.unlink(missing_ok=True)
        raise RunFailed(
            f"cannot copy {copy.source} to {copy.target.parent}: {error.strerror}; whole files are kept, "
            "and the same command goes on"
        ) from error
    except BaseException:
        copy.part.unlink(missing_ok=True)
        raise


def _is_whole(copy: Copy, tally: _Tally) -> bool:
    try:
        return _read(copy.target, tally) == copy.sha256
    except OSError:
        return False


_MEND = "bring it back, or make the shards again (fortyfold data shard)"


def _read(path: Path, tally: _Tally, write: Callable[[memoryview], object] | None = None) -> str:
    """The file's SHA-256; each block goes to `write`, too."""
    digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            if write is not None:
                write(block[:count])
            tally.add(count)
    return digest.hexdigest()


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
