"""What all long work on files shares: threads whose results come in order, and a look at the disk beforehand."""

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from fortyfold.spec.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int, int], None]  # how many are done, of how many

_SPARE_BYTES = 64 << 20  # what is left free for everybody else


def ordered(
    function: Callable[[Item], Result], items: Iterable[Item], num_threads: int, ahead: int = 4
) -> Iterator[Result]:
    """function(item) for each item, by threads, in the items' order; at most `ahead` × threads results wait."""
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="work")
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= ahead * num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def require_space(folder: Path, needed_bytes: int) -> None:
    """Refuse to begin what the disk under `folder` cannot hold."""
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed_bytes + _SPARE_BYTES > free:
        raise UserError(
            f"{folder} needs about {in_words(needed_bytes)}, but its disk has {in_words(free)} free; "
            "free some, or choose another disk"
        )


def in_words(num_bytes: float) -> str:
    """Bytes in the unit that fits."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" or num_bytes >= 100 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def printable(path: str) -> str:
    """A path in one line of UTF-8, whatever bytes its name has."""
    return os.fsencode(path).decode(errors="backslashreplace").replace("\n", "\\n")


def replace_file(path: Path, content: bytes) -> None:
    """Write `path` so that a kill leaves the old file or the new one, never a part. Not fsynced: of a million
    small files that would take hours; what marks a folder as whole comes after `settle`."""
    beside = path.with_name(f".{path.name}.part")
    beside.write_bytes(content)
    beside.replace(path)


def settle() -> None:
    """Bring everything written so far to the disk, before a mark says that it is there."""
    os.sync()


def counter(progress: Progress, total: int) -> Callable[[int], None]:
    """A function to call with how many more are done."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return advance
