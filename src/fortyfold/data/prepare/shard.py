"""A split as shards: WebDataset tar files and shards.index (data/shards.py), losslessly tiled where that pays.

Which sample goes to which shard is fixed by the source and the number of shards, so several jobs may share the work
(`part`), and the result is the same bytes however often it was interrupted: a shard with its final name is whole.
Inside the tar files the samples lie in a random order, so that reading them one after another is a shuffle, too.
"""

import fcntl
import hashlib
import json
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from fortyfold.data import decode, order
from fortyfold.data.decode import Headers
from fortyfold.data.index import Index
from fortyfold.data.order import Ids
from fortyfold.data.prepare.work import Progress, counter, ordered, require_space
from fortyfold.data.shards import ROW_DTYPE, Rows, ShardFile, is_sharded, read_head, shard_files, write_index
from fortyfold.spec.errors import UserError
from fortyfold.spec.run_dir import fsync_folder, write_atomically

PLAN_NAME = "shards.plan"
TILE_FROM_PIXELS = 50_000  # auto: smaller images gain little (benchmarks/entropy.py)
_STORAGE_SEED = 0x5EED
_BLOCK = tarfile.BLOCKSIZE
_SCRATCH = re.compile(r"\.\d{6}\.(part|rows)|\.(\.\d{6}\.rows|shards\.plan|shards\.index)\.[\w-]+")
_OVERHEAD_BYTES = 4 * _BLOCK  # headers and padding of an image and its label
_MOST_BYTES = 1 << 32

Unreadable = list[list[str]]  # name and reason of each image that is kept as it is
Advance = Callable[[int], None]  # so many more images are done


@dataclass(frozen=True)
class Sharding:
    """What is to be made: these arguments fix every byte."""

    index: Index
    num_shards: int
    tile: str  # auto, always, never

    def samples(self, shard: int) -> Ids:
        """The samples of a shard, in the order in which it stores them."""
        return order.permutation(len(self.index), _STORAGE_SEED, 0)[order.cut(len(self.index), shard, self.num_shards)]

    def plan(self) -> dict[str, Any]:
        tiled_by = decode.TILER if self.tile != "never" else None  # another libjpeg may write other bytes
        fingerprint = self.index.fingerprint
        return {"fingerprint": fingerprint, "num_shards": self.num_shards, "tile": self.tile, "tiled_by": tiled_by}


@dataclass(frozen=True)
class Outcome:
    num_made: int  # shards made now
    num_missing: int  # shards that other parts have yet to make


def count_shards(source_bytes: int, shard_bytes: int, num_samples: int) -> int:
    return max(1, min(num_samples, -(-source_bytes // shard_bytes)))


def source_sizes(index: Index, num_threads: int) -> int:
    """Bytes of all images together."""
    if index.shards is not None:
        return int(index.shards.places.lengths.sum())
    files = index.places(np.arange(len(index))).files
    chunks = [files[start : start + 1000] for start in range(0, len(files), 1000)]
    return sum(ordered(_total_size, chunks, num_threads))


def _total_size(files: list[bytes]) -> int:
    return sum(os.stat(file).st_size for file in files if os.path.exists(file))  # noqa: PTH110, PTH116


def make_shards(
    work: Sharding, folder: Path, part: tuple[int, int], num_threads: int, source_bytes: int, progress: Progress
) -> Outcome:
    """Make this part's shards in `folder`, and the index if they were the last."""
    if _is_whole(work, folder):
        return Outcome(0, 0)
    _claim(work, folder)
    mine = range(part[0], work.num_shards, part[1])
    _require_space(work, folder, mine, source_bytes)
    made = 0
    advance = counter(progress, sum(len(work.samples(shard)) for shard in mine))
    for shard in mine:
        if _path(folder, shard).exists():
            advance(len(work.samples(shard)))
        else:
            made += _make_shard(work, folder, shard, num_threads, advance)
    missing = sum(not _path(folder, shard).exists() for shard in range(work.num_shards))
    if not missing:
        _write_index(work, folder)
    return Outcome(made, missing)


def _is_whole(work: Sharding, folder: Path) -> bool:
    head = read_head(folder)
    if not head:
        return False
    source = head.get("source")
    wanted = {key: value for key, value in work.plan().items() if key != "tiled_by"}  # whole is whole
    if not isinstance(source, dict) or any(source.get(key) != value for key, value in wanted.items()):
        raise UserError(f"{folder} already has other shards in it; choose another folder, or remove it first")
    for file in shard_files(folder):
        path = folder / file.name
        if not path.exists() or path.stat().st_size != file.num_bytes:
            raise UserError(f"{path} is missing or has another size; remove {folder} and run the command again")
    _sweep(folder)
    return True


def _claim(work: Sharding, folder: Path) -> None:
    """Say in the folder what is being made in it; refuse one with something else."""
    folder.mkdir(parents=True, exist_ok=True)
    plan, path = work.plan(), folder / PLAN_NAME
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        foreign = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
        if PLAN_NAME in foreign:  # another part wrote it just now
            _claim(work, folder)
        elif foreign and not is_sharded(folder):  # it is if other parts have just finished
            raise UserError(f"{folder} already has files in it ({foreign[0]}); choose another folder") from None
        elif not foreign:
            write_atomically(path, json.dumps(plan).encode())
        return
    except ValueError:
        found = {}
    if found != plan:
        differing = ", ".join(
            f"{key} = {found.get(key)} (now {plan[key]})" for key in plan if found.get(key) != plan[key]
        )
        raise UserError(f"{folder} was begun with {differing}; choose another folder, or remove it first")


def _require_space(work: Sharding, folder: Path, mine: range, source_bytes: int) -> None:
    left = sum(len(work.samples(shard)) for shard in mine if not _path(folder, shard).exists())
    mean_bytes = source_bytes / len(work.index) * (1 if work.tile == "never" else 1.04)
    require_space(folder, int(left * (mean_bytes + _OVERHEAD_BYTES)))


def _path(folder: Path, shard: int) -> Path:
    return folder / f"{folder.name}-{shard:06d}.tar"


def _notes_path(folder: Path, shard: int) -> Path:
    """Holds a whole shard's rows until the index is written."""
    return folder / f".{shard:06d}.rows"


def _make_shard(work: Sharding, folder: Path, shard: int, num_threads: int, advance: Advance) -> int:
    """1 if it was made, 0 if somebody else just made it. The lock dies with its holder; the rest is overwritten."""
    final, beside = _path(folder, shard), folder / f".{shard:06d}.part"
    with beside.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not _is_still(file, beside):  # it was finished meanwhile, and has its final name
            return 0 if final.exists() else _make_shard(work, folder, shard, num_threads, advance)
        file.seek(0)
        file.truncate()
        rows, unreadable, digest = _write_shard(work, shard, file, num_threads, advance)
        file.flush()
        os.fsync(file.fileno())
        head = {"sha256": digest, "num_bytes": file.tell(), "unreadable": unreadable}
        write_atomically(_notes_path(folder, shard), json.dumps(head).encode() + b"\n" + rows.tobytes())
        beside.replace(final)
        fsync_folder(folder)
    return 1


def _is_still(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _read_notes(folder: Path, shard: int) -> tuple[dict[str, Any], Rows]:
    head_line, _, body = _notes_path(folder, shard).read_bytes().partition(b"\n")
    return json.loads(head_line), np.frombuffer(body, ROW_DTYPE)


def _write_shard(
    work: Sharding, shard: int, file: IO[bytes], num_threads: int, advance: Advance
) -> tuple[Rows, Unreadable, str]:
    """Rows of the samples (in the shard's order), the unreadable ones, and the file's SHA-256."""
    index, samples, digest = work.index, work.samples(shard), hashlib.sha256()
    rows = np.zeros(len(samples), ROW_DTYPE)
    headers, reasons = decode.read_headers(index.places(samples), num_threads)
    headers[list(reasons)] = (0, 0, 1)
    rows["shard"], rows["label"] = shard, index.labels[samples]
    rows["width"], rows["height"], rows["orientation"] = headers.T
    for row, blob in enumerate(_stored(work, samples, headers, num_threads)):
        sample = int(samples[row])
        name = index.relative_path(sample)
        suffix = Path(name).suffix.lower().replace(".jpeg", ".jpg")
        rows[row]["offset"] = file.tell() + _BLOCK
        rows[row]["length"], rows[row]["checksum"] = len(blob), zlib.crc32(blob)
        rows[row]["name_bytes"] = len(os.fsencode(name))
        label = str(int(index.labels[sample])).encode()
        for piece in (*_member(f"{sample:09d}{suffix}", blob), *_member(f"{sample:09d}.cls", label)):
            file.write(piece)
            digest.update(piece)
        advance(1)
    end = bytes(2 * _BLOCK)
    file.write(end)
    digest.update(end)
    unreadable = [[index.relative_path(int(samples[row])), reason] for row, reason in sorted(reasons.items())]
    return rows, unreadable, digest.hexdigest()


def _stored(work: Sharding, samples: Ids, headers: Headers, num_threads: int) -> Iterator[bytes]:
    """The bytes of each sample, tiled where wanted and possible."""
    places = work.index.places(samples)

    def load(row: int) -> bytes:
        try:
            blob = places.read(row)
        except (FileNotFoundError, IsADirectoryError):  # a link that leads nowhere; it is named as unreadable
            blob = b""
        if len(blob) >= _MOST_BYTES:
            raise UserError(f"{work.index.path(int(samples[row]))} has {len(blob)} bytes; that is no training image")
        large = headers[row, 0] * headers[row, 1] >= TILE_FROM_PIXELS
        wanted = work.tile == "always" or (work.tile == "auto" and large)
        return (decode.tile(blob) if wanted else None) or blob

    return ordered(load, range(len(samples)), num_threads)


def _member(name: str, content: bytes) -> tuple[bytes, bytes, bytes]:
    """A tar member, the same bytes whenever and by whomever it is made."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info.tobuf(tarfile.USTAR_FORMAT), content, bytes(-len(content) % _BLOCK)


def _write_index(work: Sharding, folder: Path) -> None:
    """Put the shards' rows in the order of sample ids. Two jobs that come to this would write the same."""
    rows = np.zeros(len(work.index), ROW_DTYPE)
    files: list[ShardFile] = []
    unreadable: Unreadable = []
    try:
        for shard in range(work.num_shards):
            head, stored = _read_notes(folder, shard)
            rows[work.samples(shard)] = stored
            files.append(ShardFile(_path(folder, shard).name, head["num_bytes"], head["sha256"]))
            unreadable += head["unreadable"]
        source = {**work.plan(), "unreadable": sorted(unreadable)}
        write_index(folder, work.index.classes, files, rows, work.index.names, source)
    except FileNotFoundError:
        if not is_sharded(folder):  # else another job was quicker, and has cleaned up
            raise
    _sweep(folder)


def _sweep(folder: Path) -> None:
    """Take away what only the making needed, and what killed jobs left."""
    assert is_sharded(folder)
    (folder / PLAN_NAME).unlink(missing_ok=True)
    for entry in folder.iterdir():
        if _SCRATCH.fullmatch(entry.name):
            entry.unlink(missing_ok=True)
