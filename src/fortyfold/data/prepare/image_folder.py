"""An ImageFolder that an import fills: DST/<split>/<class>/<file>, each file whole or absent.

A kill leaves whole files and perhaps hidden `.part` files, which the next run removes; whole files are kept.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fortyfold.data.prepare.archive import BLOCK, Source, files
from fortyfold.data.prepare.target import LOCK, MANIFEST, making
from fortyfold.data.prepare.work import Progress
from fortyfold.spec.errors import UserError

SPLITS = ("train", "val")
DOWNLOADS = ".download"  # below the data set, while it is made
Show = Callable[[str], AbstractContextManager[Progress]]  # a titled progress bar, in bytes
Place = Callable[[str], tuple[str, str] | None]  # a member's name → (class, file), or None for what is no image

_STAT_THREADS = 16  # network disks answer slowly, not seldom
_MOST_IMAGE_BYTES = 256 << 20
_BLOCK_SHARE = 1.05  # files fill whole blocks of the disk


@dataclass
class Tally:
    """What an import did."""

    images: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (split, class)
    num_kept: int = 0  # of these, how many were there already
    skipped: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        self.images.update(other.images)
        self.num_kept += other.num_kept
        self.skipped += other.skipped

    def of(self, split: str) -> tuple[int, int]:
        """(images, classes) of a split."""
        counts = [count for (name, _), count in self.images.items() if name == split]
        return sum(counts), len(counts)


@contextmanager
def importing(folder: Path, by: str, arguments: Mapping[str, Any]) -> Iterator[bool]:
    """`making`, but what ends before the first image binds nobody: the corrected command may follow."""
    with making(folder, by, arguments) as needed:
        try:
            yield needed
        except BaseException:
            with suppress(OSError):
                (folder / DOWNLOADS).rmdir()  # if nothing is in it
            if {entry.name for entry in folder.iterdir()} <= {LOCK, MANIFEST}:
                (folder / MANIFEST).unlink(missing_ok=True)
            raise


class SplitFolder:
    """One split, used by one thread: knows which files were there when it was first asked about their class."""

    def __init__(self, root: Path, split: str) -> None:
        self.split = split
        self._folder = root / split
        self._sizes: dict[str, dict[str, int]] = {}

    def locate(self, class_name: str, file: str) -> tuple[Path, int]:
        """Where a file belongs (the folder is made), and how large the one there is (0: none)."""
        folder = self._folder / class_name
        if class_name not in self._sizes:
            folder.mkdir(parents=True, exist_ok=True)
            self._sizes[class_name] = _sizes(folder)
        return folder / file, self._sizes[class_name].get(file, 0)


def missing_files(source: Source, split: SplitFolder, place: Place, tally: Tally) -> Iterator[tuple[Path, bytes]]:
    """The images of an archive that are not there yet, counting all of them.

    A file of the right size is one written whole. Out of gzip, whose damage shows only at its end, the bytes
    are compared: a damaged archive may have been unpacked before.
    """
    taken: set[tuple[str, str]] = set()
    for member in files(source, tally.skipped):
        target = place(member.name)
        if target is None or target in taken or not 0 < member.size <= _MOST_IMAGE_BYTES:
            tally.skipped.append(f"{member.name!r} ({_reason(target, target in taken)})")
            continue
        taken.add(target)
        tally.images[split.split, target[0]] += 1
        path, size_there = split.locate(*target)
        content = source.read(member.size) if source.is_compressed else None
        if size_there == member.size and (content is None or path.read_bytes() == content):
            tally.num_kept += 1
        else:
            yield path, content or source.read(member.size)


def _reason(target: tuple[str, str] | None, is_second: bool) -> str:
    if target is None:
        return "not an image of this set"
    return "a second one of this name" if is_second else "empty, or absurdly large"


def unpacked_bytes(root: Path, archive_bytes: int) -> int:
    """About how much room the images of an archive still need, counting those there."""
    folders = [folder for split in SPLITS for folder in (root / split).glob("*") if folder.is_dir()]
    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        there = sum(sum(map(_in_tar, sizes.values())) for sizes in pool.map(_sizes, folders))
    return int(max(0, archive_bytes - there) * _BLOCK_SHARE)


def check_exact(root: Path, tally: Tally) -> None:
    """Refuse to call a folder whole that has more in it than these archives: an earlier attempt's, by other labels."""
    for split in SPLITS:
        for folder in (root / split).glob("*"):
            num_others = len(list(folder.iterdir())) - tally.images[split, folder.name]
            if num_others:
                raise UserError(
                    f"{folder} has {num_others} files that are not of these archives (of an earlier attempt?); "
                    f"remove {root / split}, then repeat this"
                )


def num_files(root: Path) -> int:
    """How many whole files are there."""
    return sum(len(_sizes(folder)) for split in SPLITS for folder in (root / split).glob("*") if folder.is_dir())


def _in_tar(size: int) -> int:
    return BLOCK + -(-size // BLOCK) * BLOCK


def _sizes(folder: Path) -> dict[str, int]:
    """The size of each whole file; what a kill left of others is removed."""
    sizes = {}
    for entry in list(os.scandir(folder)):
        if entry.name.startswith(".") and entry.name.endswith(".part"):
            Path(entry.path).unlink()
        else:
            sizes[entry.name] = entry.stat().st_size
    return sizes
