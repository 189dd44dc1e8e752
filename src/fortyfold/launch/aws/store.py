"""Runs on S3 (run_root = "s3://…"): each instance writes to its own disk, and keeps a copy there that outlives it.

    python -m fortyfold.launch.aws.store fetch RUN URL REGION [--only PART]    brings what is there of the run
    python -m fortyfold.launch.aws.store set-aside RUN URL REGION              moves that out of the way

The copy follows after every checkpoint, four times a minute, and at the end. A checkpoint comes with its manifest
last, and goes with its manifest first: without one it is not whole, and is not brought back.
"""

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, get_args

from fortyfold.launch.aws.lease import leased
from fortyfold.launch.aws.session import Client, connect_from_instance
from fortyfold.launch.mirror import Change, Part, Sender, grows, is_sent, pruned, put, receiving
from fortyfold.launch.plan import Plan
from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.beside import beside
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.exit_codes import BAD_INPUT
from fortyfold.spec.run_dir import MANIFEST, RunDir
from fortyfold.spec.stop import StopFlag

LOOK_SECONDS = 1.0
ROUND_SECONDS = 15.0  # between two rounds without a new checkpoint
FINISH_SECONDS = 60.0  # for a trouble at the end to pass
AGAIN_SECONDS = 5.0


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


Tell = Callable[[dict[str, Any]], None]


@contextmanager
def keeping(plan: Plan, stop: StopFlag, tell: Tell) -> Iterator[None]:
    """On the first node: inside, the copy follows; afterwards it has all. Nothing where runs are not kept on S3.

    Whoever may not write there hears of it before training. Later troubles are notes, and the launcher is told if the
    end is not there: then it is for it to fetch. A run that somebody else has taken over is stopped.
    """
    if plan.store is None:
        yield
        return
    store = _store_of(plan)
    with leased(store.client, store.bucket, store.folder) as lease:
        keeper = _Keeper(RunDir(plan.run), store, "all", tell)
        keeper.send()

        def follow(over: threading.Event) -> None:
            keeper.follow(over, lambda: lease.lost)
            if lease.lost:
                tell({"note": f"{plan.store} was taken over by somebody else; this run stops"})
                stop.ask(signal.SIGTERM, "taken over")

        try:
            with beside("store", follow):
                try:
                    yield
                finally:
                    tell({"keeping": True})  # before what is being sent just now is waited for
        finally:
            if lease.lost or not keeper.finish():
                tell({"unkept": True})


@contextmanager
def keeping_records(plan: Plan, say: Callable[[str], None]) -> Iterator[None]:
    """On any other node, the same for its ranks' records."""
    if plan.store is None:
        yield
        return
    keeper = _Keeper(RunDir(plan.run), _store_of(plan), "records", lambda words: say(str(words["note"])))
    try:
        with beside("store", keeper.follow):
            yield
    finally:
        keeper.finish()


def _store_of(plan: Plan) -> Store:
    assert isinstance(plan.site, AwsSite) and plan.store is not None
    return open_store(plan.store, plan.site.region)


class _Keeper:
    """Sends what has changed. `tell` hears of every trouble that is new."""

    def __init__(self, run_dir: RunDir, store: Store, part: Part, tell: Tell) -> None:
        self._run_dir, self._store, self._part, self._tell = run_dir, store, part, tell
        self._sender, self._trouble = Sender(run_dir, part), ""
        self._there: dict[str, int] | None = None
        """What S3 has, once it was asked."""

    def follow(self, over: threading.Event, lost: Callable[[], bool] = lambda: False) -> None:
        newest, sent_at = "", time.monotonic()
        while not over.wait(LOOK_SECONDS) and not lost():
            now = self._newest()
            if now != newest or time.monotonic() - sent_at > ROUND_SECONDS:
                newest, sent_at = now, time.monotonic()
                self._attempt()

    def _newest(self) -> str:
        with suppress(OSError):
            return next(iter(self._run_dir.checkpoint_names()), "")
        return ""

    def finish(self) -> bool:
        """The last time: whether all is there."""
        until = time.monotonic() + FINISH_SECONDS
        while not (done := self._attempt()) and time.monotonic() < until:
            time.sleep(AGAIN_SECONDS)
        return done

    def _attempt(self) -> bool:
        done, trouble = False, ""
        try:
            self.send()
            done = True
            self.prune()
        except (UserError, OSError) as error:  # what cannot be removed costs a little, and no more
            trouble = str(error)
        if trouble and trouble != self._trouble:
            self._tell({"note": f"{trouble}; it is tried again"})
        self._trouble = trouble
        return done

    def send(self) -> None:
        """All that is not there yet."""
        if self._there is None:
            self._there = self._store.sizes()
        try:
            for change in self._sender.changes():
                with suppress(FileNotFoundError):  # it was pruned meanwhile
                    self._send(change, self._there)
        except BaseException:
            self._sender = Sender(self._run_dir, self._part)  # the next time all is looked at again
            raise

    def _send(self, change: Change, there: dict[str, int]) -> None:
        path, size = self._run_dir.path / change.path, change.offset + change.size
        if change.checkpoint:
            if there.get(change.path) != size:
                self._store.send(change.path, path)
        elif not grows(change.path) or size > there.get(change.path, -1):
            self._store.write(change.path, path.read_bytes())
        there[change.path] = size

    def prune(self) -> None:
        """What is pruned here is removed there, but never the newest that is whole."""
        there = self._there or {}
        checkpoints = _checkpoints(there)
        newest = max((name for name, files in checkpoints.items() if _is_whole(files)), default="")
        for name in pruned(checkpoints, self._sender.kept(), newest):
            for path in reversed(checkpoints[name]):
                self._store.remove(path)
                del there[path]


def _checkpoints(paths: Iterable[str]) -> dict[str, list[str]]:
    """The files of each, its manifest last."""
    found: dict[str, list[str]] = {}
    for path in sorted(paths, key=lambda path: path.endswith(f"/{MANIFEST}")):
        parts = path.split("/")
        if len(parts) == 3 and parts[0] == "checkpoints" and parts[2]:
            found.setdefault(parts[1], []).append(path)
    return found


def _is_whole(files: Sequence[str]) -> bool:
    return files[-1].endswith(f"/{MANIFEST}")


def fetch(store: Store, run_dir: RunDir, part: Part) -> None:
    """What is there of the run, and not here."""
    there = store.sizes()
    for path, size in there.items():
        if is_sent(path, part) and not (grows(path) and _size(run_dir.path / path) >= size):
            put(run_dir, path, store.read(path))
    for name, files in _checkpoints(there).items() if part == "all" else ():
        if _is_whole(files) and not (run_dir.checkpoints / name).exists():
            for path in files:
                store.fetch(run_dir, Change(path, 0, there[path], name, last=path == files[-1]))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def set_aside(store: Store, run_dir: RunDir) -> None:
    """For --fresh: under a new name, if anything is there; run.json last, so that one cut short is begun again."""
    aside = Store(store.client, store.bucket, f"{store.folder}.{time.strftime('%Y%m%d-%H%M%S')}")
    for path in sorted(store.sizes(), key=lambda path: path == run_dir.spec.name):
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
        alone = nullcontext() if options.only == "records" else leased(store.client, store.bucket, store.folder)
        with alone:
            if options.verb == "fetch":
                fetch(store, run_dir, options.only)
            else:
                set_aside(store, run_dir)
    except (UserError, RunFailed, OSError) as error:
        print(f"fortyfold: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
