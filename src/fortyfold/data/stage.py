"""A sharded data set on a node's own disk, copied there once for all processes and jobs of the node.

The copy's folder is named by content (the shards.index files, which hold every shard's SHA-256): two data sets never
mix, and who asks for the same set finds it. One process copies and holds a lock that dies with it; the others wait,
and go on in its place when it is killed. shards.index is copied last, so that a split with one is complete. Nothing is
ever evicted, and files that are not of the set are left alone.
"""

import fcntl
import hashlib
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fortyfold.data.copying import Copy, copy_all, find_damaged
from fortyfold.data.index import Index
from fortyfold.data.prepare.target import LOCK
from fortyfold.data.prepare.work import Progress, require_space
from fortyfold.data.shards import INDEX_NAME, is_sharded, shard_files
from fortyfold.data.splits import find_split, find_splits, open_split
from fortyfold.spec.errors import UserError
from fortyfold.spec.run_dir import fsync_folder

STREAMS = 4  # shards that are copied at once, unless somebody says otherwise
_WAIT_SECONDS, _LONGEST_WAIT_SECONDS, _WAIT_GROWTH = 0.2, 2.0, 1.3

Say = Callable[[str], None]


@dataclass(frozen=True)
class Staged:
    root: Path
    """Where to read: train/ and val/ as in the source."""
    num_copied: int
    """Shards copied now, by this process."""
    copied_bytes: int
    there_bytes: int
    """Of shards that need not be copied now."""
    seconds: float
    """Taken by the copying, without waiting and verifying."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"root": str(self.root)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Staged":
        return cls(**value | {"root": Path(value["root"])})


def stage(
    source: Path, scratch: Path, num_streams: int, progress: Progress, *, verify: bool = False, say: Say = print
) -> Staged:
    """Copy what is missing of `source` below `scratch`, or wait for the process that does.

    `progress` hears bytes, a few times a second, and may raise to stop. `verify` also reads what is there.
    """
    plan = _plan(source, scratch)
    lock = _take_or_wait(plan, verify, progress, say)
    if lock is None:
        return Staged(plan.root, 0, 0, plan.num_bytes, 0.0)
    try:
        return _fill(plan, num_streams, verify, progress)
    finally:
        os.close(lock)


def open_staged(source: Path, staged: Path, split: str) -> Index:
    """The index of a staged split: read from the copy, named by the original, which outlives it."""
    return replace(open_split(staged, split), folder=find_split(source, split).resolve())


def scratch_folder(text: str, key: str = "data.stage") -> Path:
    """The folder that a recipe's data.stage (or another key) means, its environment variables filled in."""
    for braced, plain in re.findall(r"\$(?:\{(\w+)\}|(\w+))", text, re.ASCII):
        if not os.environ.get(braced or plain):
            raise UserError(f'{key} = "{text}": the environment variable {braced or plain} is not set')
    return Path(os.path.expandvars(text)).expanduser()


@dataclass(frozen=True)
class _Plan:
    """Which files the staged set consists of."""

    root: Path
    shards: list[Copy]
    indexes: list[Copy]

    @property
    def num_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self.shards)

    def is_whole(self) -> bool:
        return all(copy.is_there() for copy in (*self.indexes, *self.shards))

    def bytes_there(self) -> int:
        return sum(copy.bytes_there() for copy in self.shards)


def _plan(source: Path, scratch: Path) -> _Plan:
    splits, content = find_splits(source), hashlib.sha256()
    found: dict[str, Copy] = {}
    for split, folder in splits.items():
        if not is_sharded(folder):
            raise UserError(f"{folder} is not sharded; make shards first: fortyfold data shard {source} DST")
        with (folder / INDEX_NAME).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[split] = Copy(folder / INDEX_NAME, Path(), os.fstat(file.fileno()).st_size, digest)
        content.update(f"{split} {digest}\n".encode())
    root = scratch.resolve() / f"{source.resolve().name}-{content.hexdigest()[:12]}"
    indexes = [replace(copy, target=root / split / INDEX_NAME) for split, copy in found.items()]
    shards = [
        Copy(folder / file.name, root / split / file.name, file.num_bytes, file.sha256)
        for split, folder in splits.items()
        for file in shard_files(folder)
    ]
    return _Plan(root, shards, indexes)


def _take_or_wait(plan: _Plan, verify: bool, progress: Progress, say: Say) -> int | None:
    """A descriptor of the lock, which makes this process the one that copies; None when nothing is to be done."""
    wait_seconds, told = _WAIT_SECONDS, ""
    while verify or not plan.is_whole():
        lock = _try_lock(plan.root)
        if lock is not None:
            return lock
        holder = _read_holder(plan.root)
        if holder and holder != told:
            say(f"waiting for {holder}, which stages the same data to {plan.root}")
            told = holder
        progress(plan.bytes_there(), plan.num_bytes)
        time.sleep(wait_seconds)
        wait_seconds = min(wait_seconds * _WAIT_GROWTH, _LONGEST_WAIT_SECONDS)
    return None


def _try_lock(root: Path) -> int | None:
    """A descriptor of the locked lock file, or None while another process has it."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = os.open(root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"cannot write to {root}: {error.strerror}; choose another scratch folder") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), (root / LOCK).stat()):  # else the folder was removed meanwhile
            _sign(lock)
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        os.close(lock)
        raise UserError(f"cannot lock {root / LOCK}: {error.strerror}; choose another scratch folder") from None
    os.close(lock)
    return None


def _sign(lock: int) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"process {os.getpid()} on {socket.gethostname()} since {since}"
    with suppress(OSError):  # a full disk is not the lock's business
        os.ftruncate(lock, os.pwrite(lock, text.encode(), 0))


def _read_holder(root: Path) -> str:
    try:
        return (root / LOCK).read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _fill(plan: _Plan, num_streams: int, verify: bool, progress: Progress) -> Staged:
    """Copy what is missing or damaged; the lock must be held."""
    total, everything = plan.num_bytes, [*plan.shards, *plan.indexes]
    for copy in everything:
        copy.target.parent.mkdir(exist_ok=True)
        copy.part.unlink(missing_ok=True)  # a killed process left it
    for copy in plan.shards:
        if not copy.is_there():
            (copy.target.parent / INDEX_NAME).unlink(missing_ok=True)
    there = {copy for copy in everything if copy.is_there()}
    if verify:  # the damaged are replaced below, not removed: a job may be reading them
        there -= set(find_damaged(list(there), num_streams, lambda done: progress(min(done, total), total)))
    shards = [copy for copy in plan.shards if copy not in there]
    indexes = [copy for copy in plan.indexes if copy not in there]
    if shards or indexes:
        require_space(plan.root, sum(copy.num_bytes for copy in (*shards, *indexes)))
    num_bytes = sum(copy.num_bytes for copy in shards)
    started = time.perf_counter()
    copy_all(shards, num_streams, lambda done: progress(total - num_bytes + done, total))
    _settle(plan)
    copy_all(indexes, 1, lambda done: progress(total, total))
    _settle(plan)
    return Staged(plan.root, len(shards), num_bytes, total - num_bytes, time.perf_counter() - started)


def _settle(plan: _Plan) -> None:
    for index in plan.indexes:
        fsync_folder(index.target.parent)
