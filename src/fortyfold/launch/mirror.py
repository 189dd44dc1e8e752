"""Keeps a copy of a run directory on another machine up to date: what ssh brings back where no disk is shared.

    python -m fortyfold.launch.mirror send RUN [--once] [--only PART]    writes changes to stdout, once a second
    python -m fortyfold.launch.mirror receive RUN                        reads them from stdin
    python -m fortyfold.launch.mirror state RUN                          says which run it is, and how far
    python -m fortyfold.launch.mirror set-aside RUN                      moves it out of the way

A change is a line of JSON with a path and how many bytes follow it. Files that only grow (records, events, logs) are
sent from where they were, and of two copies the longer is the newer; others whole, and put in place by renaming. A
checkpoint is sent when it is whole, the newest first, its manifest last, and is whole or absent in the copy, too. What
one side has and the other never had is left alone, and so is the newest that there is.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal, get_args

from fortyfold.spec.errors import RunFailed
from fortyfold.spec.run_dir import MANIFEST, RECEIVING, RunDir, write_atomically

ROUND_SECONDS = 1.0
BLOCK_BYTES = 1 << 20
_GROWING = ("events-*.jsonl", "steps-*.bin", "logs/rank-*.log")
_WHOLE = ("launch/check.json", "run.json", "stopped.json", "summary.csv", "dawnbench.tsv", "points.csv")


Part = Literal["records", "no-checkpoints", "all"]
"""Of a run. The records are what every rank writes for itself: steps, events and logs."""


@dataclass(frozen=True)
class Change:
    path: str
    offset: int
    size: int
    checkpoint: str = ""
    """The checkpoint that this file is of; `last` completes it."""
    last: bool = False


class Sender:
    """What has changed in a run directory since it was last asked."""

    def __init__(self, run_dir: RunDir, part: Part = "all") -> None:
        self._run_dir, self._part = run_dir, part
        self._sent: dict[str, tuple[int, int, int]] = {}  # inode, size and time of change
        self._checkpoints: set[str] = set()

    def kept(self) -> list[str]:
        """The checkpoints that there are; older ones of the copy that are not among them were pruned."""
        return [] if self._part == "records" else self._run_dir.checkpoint_names()

    def changes(self) -> Iterator[Change]:
        """Records before checkpoints: what led to one is there first."""
        saved = self._run_dir.checkpoint_names() if self._part == "all" else []
        for pattern in _GROWING:
            yield from self._changed(pattern, grows=True)
        if self._part != "records":
            for pattern in _WHOLE:
                yield from self._changed(pattern, grows=False)
        yield from self._new_checkpoints(saved)

    def _changed(self, pattern: str, *, grows: bool) -> Iterator[Change]:
        for path in sorted(self._run_dir.path.glob(pattern)):
            with suppress(FileNotFoundError):
                facts, name = path.stat(), path.relative_to(self._run_dir.path).as_posix()
                now, before = (facts.st_ino, facts.st_size, facts.st_mtime_ns), self._sent.get(name, (0, 0, 0))
                if now != before:
                    same = grows and now[0] == before[0] and now[1] >= before[1]
                    offset = before[1] if same else 0
                    self._sent[name] = now
                    yield Change(name, offset, now[1] - offset)

    def _new_checkpoints(self, names: list[str]) -> Iterator[Change]:
        for name in names:
            if name in self._checkpoints:
                continue
            with suppress(FileNotFoundError):  # it was pruned meanwhile
                files = sorted((self._run_dir.checkpoints / name).iterdir(), key=lambda path: path.name == MANIFEST)
                sizes = [path.stat().st_size for path in files]
                for path, size in zip(files, sizes, strict=True):
                    relative = path.relative_to(self._run_dir.path).as_posix()
                    yield Change(relative, 0, size, checkpoint=name, last=path == files[-1])
                self._checkpoints.add(name)


def write_change(run_dir: RunDir, change: Change, out: BinaryIO) -> None:
    with (run_dir.path / change.path).open("rb") as file:
        file.seek(change.offset)
        out.write(json.dumps(change.__dict__).encode() + b"\n")
        left = change.size
        while left:
            block = file.read(min(BLOCK_BYTES, left))
            if not block:  # it shrank: what is missing is made up for by the next round
                block = bytes(left)
            out.write(block)
            left -= len(block)


def read_changes(run_dir: RunDir, source: BinaryIO) -> Iterator[Change]:
    """Apply what comes, change by change, until the other side ends. What its shell says before is passed over."""
    begun = False
    while line := source.readline():
        try:
            words = json.loads(line)
        except ValueError:
            words = None
        if not isinstance(words, dict):
            if begun:
                raise RunFailed("the other side talks nonsense")
            continue
        begun = True
        if "keep" in words:
            _prune(run_dir, words["keep"])
            continue
        change = Change(**words)
        _apply(run_dir, change, source)
        yield change


def pruned(names: Iterable[str], keep: Collection[str], newest: str) -> list[str]:
    """The checkpoints of a copy to be removed, when the original has those to `keep`, and the copy `newest`: that one
    stays until a newer one is whole, and so does what is newer than all of the original's, which never had it."""
    return [name for name in names if keep and name not in keep and name < min(max(keep), newest)]


def _prune(run_dir: RunDir, keep: list[str]) -> None:
    names = run_dir.checkpoint_names()
    for name in pruned(names, keep, max(names, default="")):
        shutil.rmtree(run_dir.checkpoints / name)
    for part in run_dir.checkpoints.glob(f"{RECEIVING}*"):  # of one that was pruned there while it was sent
        if keep and part.name.removeprefix(RECEIVING) not in keep:
            shutil.rmtree(part, ignore_errors=True)


def _apply(run_dir: RunDir, change: Change, source: BinaryIO) -> None:
    if change.offset:  # hosts that share a disk after all send the same, each in its time: nothing is ever cut off
        with (run_dir.path / _safe(change.path)).open("r+b") as file:
            file.seek(change.offset)
            _copy(source, file, change.size)
    elif change.checkpoint:
        with receiving(run_dir, change) as file:
            _copy(source, file, change.size)
    else:
        put(run_dir, change.path, _read(source, change.size))


def put(run_dir: RunDir, path: str, data: bytes) -> None:
    """A whole file that is no checkpoint's, unless it is one that grows, and is longer already."""
    target = run_dir.path / _safe(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if not (grows(path) and target.exists() and target.stat().st_size > len(data)):
        write_atomically(target, data)


@contextmanager
def receiving(run_dir: RunDir, change: Change) -> Iterator[BinaryIO]:
    """A file of a checkpoint, to be written to. The last one makes it whole."""
    name = _safe(change.checkpoint).name
    whole, beside = run_dir.checkpoints / name, run_dir.checkpoints / f"{RECEIVING}{name}"
    beside.mkdir(parents=True, exist_ok=True)
    with (beside / _safe(change.path).name).open("wb") as file:
        yield file
    if change.last and whole.exists():
        shutil.rmtree(beside)
    elif change.last:
        beside.rename(whole)


def grows(path: str) -> bool:
    """Whether it is a file that is only ever added to."""
    return any(PurePosixPath(path).match(pattern) for pattern in _GROWING)


def is_sent(path: str, part: Part) -> bool:
    """Whether a file that is no checkpoint's is of that part of a run."""
    return grows(path) or (part != "records" and path in _WHOLE)


@dataclass(frozen=True)
class State:
    """Which run it is, and how far."""

    id: str = ""
    attempt: int = 0
    newest: str = ""
    """Its newest checkpoint."""
    sees: bool = False
    """Whether it is the folder with the mark that was asked for."""


def read_state(run_dir: RunDir) -> State:
    return State(run_dir.read_id(), run_dir.read_attempt() or 0, next(iter(run_dir.checkpoint_names()), ""))


def _safe(text: str) -> PurePosixPath:
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts:
        raise RunFailed(f"the other side sends a file to {text!r}")
    return path


def _copy(source: BinaryIO, file: BinaryIO, size: int) -> None:
    while size:
        block = _read(source, min(BLOCK_BYTES, size))
        file.write(block)
        size -= len(block)


def _read(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) < size:
        raise RunFailed("the connection ended in the middle of a file")
    return data


def send(run_dir: RunDir, out: BinaryIO, part: Part = "all", *, once: bool = False) -> None:
    sender = Sender(run_dir, part)
    while True:
        for change in sender.changes():
            with suppress(FileNotFoundError):
                write_change(run_dir, change, out)
        out.write(json.dumps({"keep": sender.kept()}).encode() + b"\n")
        out.flush()
        if once:
            return
        time.sleep(ROUND_SECONDS)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="fortyfold.launch.mirror")
    parser.add_argument("verb", choices=["send", "receive", "state", "set-aside"])
    parser.add_argument("run", type=Path)
    parser.add_argument("--once", action="store_true", help="what there is now, and no more")
    parser.add_argument("--only", choices=get_args(Part), default="all", help="which part of the run")
    parser.add_argument("--mark", default="", help="of a file in launch/ that may be there")
    options = parser.parse_args(arguments)
    run_dir = RunDir(options.run.expanduser())
    if options.verb == "state":
        sees = bool(options.mark) and (run_dir.launch / options.mark).exists()
        print(json.dumps(asdict(replace(read_state(run_dir), sees=sees))))
        return
    if options.verb == "set-aside":
        run_dir.set_aside(only_if_run=False)
        return
    if options.verb == "receive":
        for _ in read_changes(run_dir, sys.stdin.buffer):
            pass
        return
    with suppress(BrokenPipeError):
        send(run_dir, sys.stdout.buffer, options.only, once=options.once)


if __name__ == "__main__":
    main(sys.argv[1:])
