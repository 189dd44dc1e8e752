"""A split in shards: WebDataset tar files (<id>.jpg, <id>.cls) and one index of where each image lies.

shards.index is a line of JSON (classes, the files with their bytes and SHA-256, what they were made from), then a
row of ROW_DTYPE for each sample in the order of sample ids, then the samples' names. Any WebDataset reader opens
the tar files; the index gives random access, so that an epoch is shuffled as a whole.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fortyfold.data.index import Index, Shards
from fortyfold.data.places import Places
from fortyfold.spec.errors import UserError
from fortyfold.spec.run_dir import write_atomically

INDEX_NAME = "shards.index"
_VERSION = 1
_STAT_THREADS = 16  # network disks answer slowly, not seldom
_MOST_HEAD_BYTES = 64 << 20
_MOST_SHARD_BYTES = 1 << 62  # offsets fit in an int64
ROW_DTYPE = np.dtype(
    [
        ("offset", "<u8"),  # of the image's bytes in its tar file
        ("length", "<u4"),
        ("shard", "<u4"),
        ("label", "<i4"),
        ("checksum", "<u4"),  # CRC-32 of the image's bytes
        ("width", "<u4"),  # of the image as stored; 0 where it could not be read
        ("height", "<u4"),
        ("name_bytes", "<u2"),
        ("orientation", "u1"),  # EXIF's, 1…8
        ("reserved", "u1"),
    ]
)
Rows = NDArray[np.void]


@dataclass(frozen=True)
class ShardFile:
    name: str
    num_bytes: int
    sha256: str


def is_sharded(folder: Path) -> bool:
    return (folder / INDEX_NAME).is_file()


def open_shards(folder: Path) -> Index:
    """The index of the shards in `folder`. Nothing in it is believed before it was checked."""
    path = folder / INDEX_NAME
    try:
        head, rows, names = _read(path)
        index = _to_index(folder, head, rows, names)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        reason = error if isinstance(error, _Damaged) else "its content makes no sense"
        raise UserError(
            f"{path} is damaged ({reason}); copy it again, or remove {folder} and run data shard again"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    _require_files(folder, [ShardFile(**entry) for entry in head["shards"]])
    return index


def _require_files(folder: Path, files: list[ShardFile]) -> None:
    """A shard that is missing would cost a training hundreds of images, one by one."""

    def is_whole(file: ShardFile) -> bool:
        try:
            return (folder / file.name).stat().st_size == file.num_bytes
        except OSError:
            return False

    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        for file, whole in zip(files, pool.map(is_whole, files), strict=True):
            if not whole:
                raise UserError(
                    f"{folder / file.name} is missing or has another size than {INDEX_NAME} says; copy it again"
                )


def read_head(folder: Path) -> dict[str, Any]:
    """What shards.index says of the whole: classes, shards, source. Not verified against the rows."""
    try:
        with (folder / INDEX_NAME).open("rb") as file:
            head = json.loads(file.readline(_MOST_HEAD_BYTES))
        return head if isinstance(head, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def shard_files(folder: Path) -> list[ShardFile]:
    """The tar files that belong to the index."""
    open_shards(folder)  # checks it
    return [ShardFile(**entry) for entry in read_head(folder)["shards"]]


def write_index(
    folder: Path, classes: tuple[str, ...], files: list[ShardFile], rows: Rows, names: bytes, source: dict[str, Any]
) -> None:
    """Write shards.index; from then on the folder is a split."""
    body = rows.tobytes() + names
    head = {
        "format": "fortyfold shards",
        "version": _VERSION,
        "source": source,
        "num_samples": len(rows),
        "sha256": hashlib.sha256(body).hexdigest(),
        "classes": classes,
        "shards": [asdict(file) for file in files],
    }
    write_atomically(folder / INDEX_NAME, json.dumps(head).encode() + b"\n" + body)


class _Damaged(ValueError):
    """Says what is wrong with an index."""


def _read(path: Path) -> tuple[dict[str, Any], Rows, bytes]:
    with path.open("rb") as file:
        head = json.loads(file.readline(_MOST_HEAD_BYTES))
        if not isinstance(head, dict) or head.get("format") != "fortyfold shards":
            raise _Damaged("it is no index of shards")
        if head["version"] != _VERSION:
            raise _Damaged(f"it has version {head['version']!r:.40}; this fortyfold reads version {_VERSION}")
        num_rows, room = head["num_samples"], os.fstat(file.fileno()).st_size - file.tell()
        if not _is_count(num_rows, room // ROW_DTYPE.itemsize):
            raise _Damaged("it is cut off")
        packed = file.read(num_rows * ROW_DTYPE.itemsize)
        rows = np.frombuffer(packed, ROW_DTYPE)
        names = file.read(min(room, int(rows["name_bytes"].sum(dtype=np.int64)) + 1))  # one more would be a mistake
    digest = hashlib.sha256(packed)
    digest.update(names)
    if digest.hexdigest() != head["sha256"]:
        raise _Damaged("its checksum is wrong")
    return head, rows, names


def _is_count(number: object, most: int) -> bool:
    """JSON also has floats, infinite ones and none at all, and Python counts with True."""
    return type(number) is int and 0 <= number <= most


def _to_index(folder: Path, head: dict[str, Any], rows: Rows, names: bytes) -> Index:
    files, classes = _read_files(head["shards"]), _read_classes(head["classes"])
    ends = np.cumsum(rows["name_bytes"], dtype=np.int64)
    _check(files, classes, rows, ends, names)
    _check_names(names, ends - rows["name_bytes"], ends)
    paths = [os.fsencode(folder / file.name) for file in files]
    places = Places(
        paths, rows["shard"].astype(np.int32), rows["offset"].astype(np.int64), rows["length"].astype(np.int64)
    )
    headers = np.stack([rows[field].astype(np.int32) for field in ("width", "height", "orientation")], axis=1)
    shards = Shards(places, rows["checksum"].copy(), headers)
    return Index(folder, classes, rows["label"].astype(np.int32), names, ends, shards)


def _read_files(entries: list[dict[str, Any]]) -> list[ShardFile]:
    files = [ShardFile(**entry) for entry in entries]
    for file in files:
        if not isinstance(file.name, str) or {"/", "\0"} & set(file.name) or not file.name.endswith(".tar"):
            raise _Damaged(f"it names the file {file.name!r:.80}")
        if not _is_count(file.num_bytes, _MOST_SHARD_BYTES) or not isinstance(file.sha256, str):
            raise _Damaged(f"what it says of {file.name!r:.80} makes no sense")
    return files


def _read_classes(names: list[str]) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _Damaged("its classes have no names")
    if len(set(names)) != len(names):
        raise _Damaged("two of its classes have one name")
    for name in names:
        os.fsencode(name)  # raises ValueError for what is no text
    return tuple(names)


def _check_names(names: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
    """Whoever unpacks the samples under their names stays below his folder."""
    first = np.frombuffer(names, np.uint8)[np.minimum(starts, len(names) - 1)]
    leads_up = any(names.startswith(b"../", start) for start in starts[first == ord(".")].tolist())
    if (starts == ends).any() or (first == ord("/")).any() or leads_up or b"/../" in names or b"\0" in names:
        raise _Damaged("it has impossible names")


def _check(files: list[ShardFile], classes: tuple[str, ...], rows: Rows, ends: NDArray[np.int64], names: bytes) -> None:
    """A checksum tells of an accident; these also hold for an index that was made to mislead."""
    if not len(rows) or not files or not classes:
        raise _Damaged("it has no samples")
    sizes = np.array([file.num_bytes for file in files], np.uint64)
    if rows["shard"].max() >= len(files) or len(names) != ends[-1]:
        raise _Damaged("its rows lead nowhere")
    room = sizes[rows["shard"]]
    if (rows["offset"] > room).any() or (rows["length"] > room - np.minimum(rows["offset"], room)).any():
        raise _Damaged("its rows lead beyond the files' ends")
    if rows["label"].min() < 0 or rows["label"].max() >= len(classes):
        raise _Damaged("it has labels without a class")
    if max(rows["width"].max(), rows["height"].max()) >= 2**31 or rows["orientation"].max() > 8:
        raise _Damaged("it has impossible sizes")
