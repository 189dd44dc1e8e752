"""The images of a folder with a folder a class: scanned once, and cached.

Samples are numbered as torchvision's ImageFolder numbers them (classes sorted, files sorted by folder and name);
class folders named 0…999 are taken in numeric order. The cache (in the user's cache folder, since data sets are
often read-only) is trusted only while every folder's modification time is the recorded one: adding, removing or
renaming a file changes it.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from fortyfold.data.index import Index
from fortyfold.spec.errors import UserError
from fortyfold.spec.run_dir import write_atomically

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_SCAN_THREADS = 16  # network disks answer slowly, not seldom
_SETTLED_NS = 2_000_000_000  # a folder changed this shortly before its scan may change again unseen
_CACHE_VERSION = 1

ScanProgress = Callable[[int, int], None]  # class folders done, class folders in all


def open_class_folders(folder: Path, *, fresh: bool = False, progress: ScanProgress | None = None) -> Index:
    """The index of a folder of class folders, from the cache if that is still true (and not `fresh`)."""
    cached = None if fresh else _read_cache(folder)
    return cached or _scan(folder, progress or (lambda done, total: None))


def _scan(folder: Path, progress: ScanProgress) -> Index:
    started_ns = time.time_ns()
    classes = _class_names(folder)
    mtimes: dict[str, int] = {"": folder.stat().st_mtime_ns}
    per_class: list[list[str]] = []
    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        for found, folder_mtimes in pool.map(lambda name: _scan_class(folder, name), classes):
            per_class.append(found)
            mtimes |= folder_mtimes
            progress(len(per_class), len(classes))
    encoded = [os.fsencode(path) for found in per_class for path in found]
    if not encoded:
        raise UserError(f"{folder} has class folders but no image in them ({', '.join(IMAGE_SUFFIXES)})")
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), [len(found) for found in per_class])
    ends = np.cumsum([len(path) for path in encoded], dtype=np.int64)
    index = Index(folder, classes, labels, b"".join(encoded), ends)
    if max(mtimes.values()) < started_ns - _SETTLED_NS:
        _write_cache(index, mtimes)
    return index


def _class_names(folder: Path) -> tuple[str, ...]:
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}") from None
    names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    if not names:
        flat = any(entry.name.lower().endswith(IMAGE_SUFFIXES) for entry in entries)
        what = "images but no class folders; sort them into a folder a class" if flat else "no class folders"
        raise UserError(f"{folder} has {what}")
    numeric = all(name.isdecimal() for name in names)
    return tuple(sorted(names, key=lambda name: (int(name), name)) if numeric else sorted(names))


def _scan_class(folder: Path, name: str) -> tuple[list[str], dict[str, int]]:
    found: list[str] = []
    mtimes: dict[str, int] = {}
    for relative, mtime_ns, files in walk_class(folder, name):
        mtimes[relative] = mtime_ns
        found += [f"{relative}/{file}" for file in files if is_image(file)]
    found.sort(key=lambda path: path.rpartition("/")[::2])  # by folder, then by name
    return found, mtimes


def is_image(name: str) -> bool:
    """By its suffix; hidden files are none (some systems leave ._x.jpg beside x.jpg)."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def walk_class(folder: Path, name: str) -> Iterator[tuple[str, int, list[str]]]:
    """The class's folder and those below: path below `folder`, modification time, names of all files in it."""
    seen: set[tuple[int, int]] = set()  # a link back to a parent would never end
    walk: Iterator[tuple[str, list[str], list[str]]] = os.walk(
        folder / name, onerror=_refuse_unreadable, followlinks=True
    )
    for parent, children, files in walk:
        status = os.stat(parent)  # noqa: PTH116
        if (status.st_dev, status.st_ino) in seen:
            children.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        yield os.path.relpath(parent, folder), status.st_mtime_ns, files


def _refuse_unreadable(error: OSError) -> None:
    raise UserError(f"cannot read {error.filename}: {error.strerror}")


def cache_folder() -> Path:
    """Where indexes are cached: $FORTYFOLD_CACHE, or the user's cache folder."""
    own = os.environ.get("FORTYFOLD_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fortyfold"


def _cache_path(folder: Path) -> Path:
    return cache_folder() / f"index-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:24]}"


def _write_cache(index: Index, mtimes: dict[str, int]) -> None:
    """A line of JSON, then labels, ends and paths as raw bytes. A cache that cannot be written is no error."""
    head = {
        "version": _CACHE_VERSION,
        "folder": str(index.folder),
        "classes": index.classes,
        "num_samples": len(index),
        "mtimes": mtimes,
    }
    body = index.labels.astype("<i4").tobytes() + index.name_ends.astype("<i8").tobytes() + index.names
    head["sha256"] = hashlib.sha256(body).hexdigest()
    path = _cache_path(index.folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(head).encode() + b"\n" + body)
    except (OSError, UnicodeEncodeError):
        return


def _read_cache(folder: Path) -> Index | None:
    """The cached index, or None when there is none, it is damaged, or a folder changed since."""
    try:
        head_line, _, body = _cache_path(folder).read_bytes().partition(b"\n")
        head = json.loads(head_line)
        if head["version"] != _CACHE_VERSION or head["folder"] != str(folder):
            return None
        if head["sha256"] != hashlib.sha256(body).hexdigest() or not _unchanged(folder, head["mtimes"]):
            return None
        num_samples = head["num_samples"]
        labels = np.frombuffer(body, "<i4", num_samples).astype(np.int32)
        ends = np.frombuffer(body, "<i8", num_samples, offset=4 * num_samples).astype(np.int64)
        return Index(folder, tuple(head["classes"]), labels, body[12 * num_samples :], ends)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _unchanged(folder: Path, mtimes: dict[str, int]) -> bool:
    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        now = pool.map(lambda name: os.stat(folder / name).st_mtime_ns, mtimes)  # noqa: PTH116
        return all(a == b for a, b in zip(now, mtimes.values(), strict=True))
