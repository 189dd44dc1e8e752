"""Runs on S3 (run_root = "s3://…"): each instance writes to its own disk, and keeps a copy there that outlives it.

    python -m fortyfold.launch.aws.store fetch RUN URL REGION [--only PART]    brings what is there of the run
    python -m fortyfold.launch.aws.store set-aside RUN URL REGION              moves that out of the way

The copy follows after every checkpoint, four times a minute, and at the end. A checkpoint comes with its manifest
last, and goes with its manifest first: without one it is not whole, and is not brought back.
"""

import argparse
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import get_args

from fortyfold.launch.aws.lease import Lease, leased
from fortyfold.launch.aws.session import Client, connect_from_instance
from fortyfold.launch.mirror import MANIFEST, Change, Part, Sender, grows, pruned, put, receiving
from fortyfold.launch.plan import Plan
from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.beside import beside
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.exit_codes import BAD_INPUT
from fortyfold.spec.run_dir import RunDir

LOOK_SECONDS = 1.0
ROUND_SECONDS = 15.0  # between two rounds without a new checkpoint


@dataclass(frozen=True)
class Store:
    """A run's part of a bucket: files by their paths in the run directory."""

    client: Client
    bucket: str
    folder: str

    def sizes(self) -> dict[str, int]:
        """All that is there."""
        found = self.client.list("list_objects_v2", "Contents", Bucket=self.bucket, Prefix=f"{self.folder}/")
        return {each["Key"].removeprefix(f"{self.folder}/"): each["Size"] for each in found}

    def write(self, path: str, data: bytes) -> None:
        self.client("put_object", Bucket=self.bucket, Key=self._key(path), Body=data)

    def send(self, path: str, source: Path) -> None:
        """A large file, in parts, several at once."""
        with source.open("rb") as file:
            self.client("upload_fileobj", Bucket=self.bucket, Key=self._key(path), Fileobj=file)

    def fetch(self, run_dir: RunDir, change: Change) -> None:
        with receiving(run_dir, change) as file:
            self.client("download_fileobj", Bucket=self.bucket, Key=self._key(change.path), Fileobj=file)

    def read(self, path: str) -> bytes:
        buffer = BytesIO()
        self.client("download_fileobj", Bucket=self.bucket, Key=self._key(path), Fileobj=buffer)
        return buffer.getvalue()

    def remove(self, path: str) -> None:
        self.client("delete_object", Bucket=self.bucket, Key=self._key(path))

    def move(self, path: str, other: "Store") -> None:
        source = {"Bucket": self.bucket, "Key": self._key(path)}
        self.client("copy", CopySource=source, Bucket=other.bucket, Key=other._key(path))
        self.remove(path)

    def _key(self, path: str) -> str:
        return f"{self.folder}/{path}"


def open_store(url: str, region: str) -> Store:
    bucket, _, folder = url.removeprefix("s3://").partition("/")
    return Store(connect_from_instance(region), bucket, folder)


@contextmanager
def keeping(plan: Plan, part: Part) -> Iterator[None]:
    """Inside, the copy follows; afterwards it has all. Does nothing where runs are not kept on S3.

    Whoever may not write there hears of it before training; a trouble that passes is a note.
    """
    if plan.store is None:
        yield
        return
    assert isinstance(plan.site, AwsSite)
    store = open_store(plan.store, plan.site.region)
    with leased(store.client, store.bucket, store.folder) if part == "all" else nullcontext() as lease:
        keeper = _Keeper(RunDir(plan.run), store, part, lease)
        keeper.send()
        try:
            with beside("store", keeper.follow):
                yield
        except BaseException:
            with suppress(UserError, RunFailed, OSError):
                keeper.send()
            raise
        keeper.send()


class _Keeper:
    def __init__(self, run_dir: RunDir, store: Store, part: Part, lease: Lease | None) -> None:
        self._run_dir, self._store, self._part, self._lease = run_dir, store, part, lease
        self._sender, self._there = Sender(run_dir, part), store.sizes()

    def follow(self, over: threading.Event) -> None:
        newest, sent_at, told = self._run_dir.checkpoint_names()[:1], time.monotonic(), False
        while not over.wait(LOOK_SECONDS):
            now = self._run_dir.checkpoint_names()[:1]
            if now == newest and time.monotonic() - sent_at < ROUND_SECONDS:
                continue
            newest, sent_at = now, time.monotonic()
            try:
                self.send()
            except (UserError, RunFailed, OSError) as error:
                if not told:
                    print(f"note: {error}; it is tried again", file=sys.stderr, flush=True)
                told = True

    def send(self) -> None:
        """All that is not there yet; what is pruned here is removed there."""
        if self._lease is not None and self._lease.lost:
            raise RunFailed(
                f"somebody else has taken over the copy of {self._run_dir.path} on S3; nothing is sent there"
            )
        try:
            for change in self._sender.changes():
                with suppress(FileNotFoundError):  # it was pruned meanwhile
                    self._send(change)
            self._prune()
        except BaseException:
            self._sender = Sender(self._run_dir, self._part)  # the next time all is looked at again
            raise

    def _send(self, change: Change) -> None:
        path, there = self._run_dir.path / change.path, self._there.get(change.path)
        if change.checkpoint:
            if there != change.size:
                self._store.send(change.path, path)
        elif not grows(change.path) or there is None or change.offset + change.size > there:
            self._store.write(change.path, path.read_bytes())
        self._there[change.path] = change.offset + change.size

    def _prune(self) -> None:
        for name in pruned(_checkpoints(self._there), self._sender.kept()):
            for path in reversed(_checkpoints(self._there)[name]):
                self._store.remove(path)
                del self._there[path]


def _checkpoints(paths: Sequence[str] | dict[str, int]) -> dict[str, list[str]]:
    """The files of each, its manifest last."""
    found: dict[str, list[str]] = {}
    for path in sorted(paths, key=lambda path: path.endswith(f"/{MANIFEST}")):
        parts = PurePosixPath(path).parts
        if parts[0] == "checkpoints" and len(parts) == 3:
            found.setdefault(parts[1], []).append(path)
    return found


def fetch(store: Store, run_dir: RunDir, part: Part) -> None:
    """What is there of the run, and not here."""
    there = store.sizes()
    checkpoints = _checkpoints(there)
    for path, size in there.items():
        here = run_dir.path / path
        wanted = grows(path) or part != "records"
        if wanted and not path.startswith("checkpoints/") and not (grows(path) and _size(here) >= size):
            put(run_dir, path, store.read(path))
    for name in sorted(checkpoints) if part == "all" else ():
        files = checkpoints[name]
        if files[-1].endswith(MANIFEST) and not (run_dir.checkpoints / name).exists():
            for path in files:
                store.fetch(run_dir, Change(path, 0, there[path], name, last=path == files[-1]))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def set_aside(store: Store, run_dir: RunDir) -> None:
    """For --fresh: under a new name, if a run is there."""
    with leased(store.client, store.bucket, store.folder):
        there = store.sizes()
        if run_dir.spec.name in there:
            aside = Store(store.client, store.bucket, f"{store.folder}.{time.strftime('%Y%m%d-%H%M%S')}")
            for path in there:
                store.move(path, aside)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="fortyfold.launch.aws.store")
    parser.add_argument("verb", choices=["fetch", "set-aside"])
    parser.add_argument("run", type=Path)
    parser.add_argument("url")
    parser.add_argument("region")
    parser.add_argument("--only", choices=get_args(Part), default="all", help="which part of the run")
    options = parser.parse_args(arguments)
    run_dir = RunDir(options.run.expanduser())
    try:
        store = open_store(options.url, options.region)
        if options.verb == "fetch":
            fetch(store, run_dir, options.only)
        else:
            set_aside(store, run_dir)
    except (UserError, RunFailed) as error:
        print(f"fortyfold: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
