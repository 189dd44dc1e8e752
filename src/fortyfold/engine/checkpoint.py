"""Checkpoints: safetensors and a JSON manifest with SHA-256, written beside, fsynced, renamed.

A checkpoint is a folder `step-<steps done>-<attempt>`:

    model.safetensors      the network's state, by timm's own names; of several ranks what is evaluated, their mean
    ema.safetensors        the same of its moving average, where the recipe has one
    training.safetensors   what is the same on every rank: optimiser state as optim/state/<parameter>/<name>, strategy/…
    rank-00000.safetensors what a rank has for itself: generator states as rng/<device>; with several ranks model/…
                           and ema/…: statistics, or with gossip and local SGD all weights, then optim/…, too
    manifest.json          progress, the plain part of the rest, size and SHA-256 of the files, of itself too

It is there whole or not at all: each rank writes its own file and tells rank 0, which writes the rest and renames. A
torn or altered one is found by its checksums, named and passed over. Nothing is pickled, and files are verified and
parsed from one read, never mapped: a mapped file that shrinks kills the process.
"""

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch

from fortyfold.engine.progress import Progress
from fortyfold.engine.state_tree import Tensors
from fortyfold.parallel.post import Post
from fortyfold.parallel.ranks import CHUNK_BYTES, Ranks
from fortyfold.spec.errors import RunFailed
from fortyfold.spec.run_dir import MANIFEST, MODEL, RECEIVING, RunDir, fsync_folder

FORMAT = 3
EMA, TRAINING = "ema.safetensors", "training.safetensors"
_BESIDE, _DOOMED = ".writing-", ".removing-"


class Damaged(Exception):
    """A checkpoint that cannot be trusted; the message says why."""


@dataclass(frozen=True)
class Own:
    """What a rank has for itself."""

    tensors: Tensors
    plain: dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint in host memory, sharing nothing with the running model. Only rank 0 has all of it."""

    name: str
    progress: Progress
    model: Tensors
    ema: Tensors | None = None
    training: Tensors = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    """What is no tensor of the shared training state."""
    own: tuple[Own, ...] = ()
    """This rank's; read for another number of ranks, every rank's, or none where that is not needed."""
    rank: int = 0
    num_ranks: int = 1
    replicates: bool = False
    """Whether each rank has weights of its own."""

    @property
    def attempt(self) -> int:
        return int(self.name.rpartition("-")[2])


Report = dict[str, Any]
"""What a rank tells of its file: its size and hash, the plain part, and whether it was sent; or what went wrong."""


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write(run_dir: RunDir, snapshot: Snapshot, post: Post | None = None, *, far: bool = False) -> Path:
    """Make the checkpoint durable, then visible. Raises OSError and leaves nothing when it cannot.

    With several ranks all call it, and `post` brings their reports to rank 0; others return without waiting. A rank
    that is `far` does not see rank 0's disk: its file travels.
    """
    beside = run_dir.checkpoints / f"{_BESIDE}{snapshot.name}"
    if not far:
        beside.mkdir(parents=True, exist_ok=True)
    try:
        reports = _write_own(beside, snapshot, post, far)
        if reports is not None:
            _fetch_far(beside, snapshot, post, reports)
            _write_rest(beside, snapshot, reports)
            _publish(run_dir, beside, snapshot)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return run_dir.checkpoints / snapshot.name


def _write_own(beside: Path, snapshot: Snapshot, post: Post | None, far: bool) -> list[Report] | None:
    """This rank's file; gives every rank's report, on rank 0."""
    (own,) = snapshot.own
    data = safetensors.torch.save(own.tensors)
    report = {"file": _describe(data), "plain": own.plain, "sent": far}
    if post is None:
        _write_bytes(beside / rank_file(snapshot.rank), data)
        return [report]
    try:
        if far:
            post.send(snapshot.name, data)
        else:
            _write_bytes(beside / rank_file(snapshot.rank), data)
    except OSError as error:
        post.collect(snapshot.name, {"error": error.strerror})
        raise
    reports = post.collect(snapshot.name, report)
    for rank, told in enumerate(reports or ()):
        if "error" in told:
            raise OSError(0, f"{told['error']} (rank {rank})")
    return reports


def _fetch_far(beside: Path, snapshot: Snapshot, post: Post | None, reports: list[Report]) -> None:
    """On rank 0: the files of ranks that do not see its disk."""
    for rank, report in enumerate(reports):
        if post is not None and report["sent"]:
            pieces = post.fetch(snapshot.name, rank, report["file"]["bytes"])
            _write_pieces(beside / rank_file(rank), pieces)


def _write_rest(beside: Path, snapshot: Snapshot, reports: list[Report]) -> None:
    shared = ((MODEL, snapshot.model), (EMA, snapshot.ema), (TRAINING, snapshot.training))
    files = {name: _write_tensors(beside / name, tensors) for name, tensors in shared if tensors is not None}
    files |= {rank_file(rank): report["file"] for rank, report in enumerate(reports)}
    manifest = {
        "format": FORMAT,
        "progress": snapshot.progress.to_json(),
        "replicates": snapshot.replicates,
        "plain": snapshot.plain,
        "ranks": [report["plain"] for report in reports],
        "files": files,
    }
    _write_bytes(beside / MANIFEST, _manifest_bytes({**manifest, "sha256": _manifest_digest(manifest)}))
    fsync_folder(beside)


def _publish(run_dir: RunDir, beside: Path, snapshot: Snapshot) -> None:
    """The lock keeps a second writer out; should it have failed (some network disks), the later attempt wins."""
    attempt = run_dir.read_attempt()
    if attempt is not None and attempt != snapshot.attempt:
        raise RunFailed(f"attempt {attempt} has taken over {run_dir.path}; this one saves nothing any more")
    beside.rename(run_dir.checkpoints / snapshot.name)
    fsync_folder(run_dir.checkpoints)
    fsync_folder(run_dir.path)


def read(path: Path, rank: int = 0, num_ranks: int = 1, *, training: bool = True) -> Snapshot:
    """A verified checkpoint for one rank of several; raises Damaged. Without `training`, only the networks are read."""
    manifest = _read_manifest(path)
    try:
        saved_ranks = len(manifest["ranks"])
        wanted = _own_ranks(manifest, rank, num_ranks) if training else []
        shared = [MODEL, *([EMA] if EMA in manifest["files"] else []), *([TRAINING] if training else [])]
        names = [*shared, *map(rank_file, wanted)]
        tensors = {name: _read_tensors(path / name, manifest["files"][name]) for name in names}
        return Snapshot(
            name=path.name,
            progress=Progress.from_json(manifest["progress"]),
            model=tensors[MODEL],
            ema=tensors.get(EMA),
            training=tensors.get(TRAINING, {}),
            plain=manifest["plain"],
            own=tuple(Own(tensors[rank_file(number)], manifest["ranks"][number]) for number in wanted),
            rank=rank,
            num_ranks=saved_ranks,
            replicates=manifest["replicates"],
        )
    except (KeyError, TypeError, IndexError) as error:
        raise Damaged(f"its manifest is of another kind ({error})") from None


def _own_ranks(manifest: dict[str, Any], rank: int, num_ranks: int) -> list[int]:
    """Whose own files are of use to this rank: with another number of ranks all replicas, to average them."""
    saved = len(manifest["ranks"])
    if saved == num_ranks:
        return [rank]
    return list(range(saved)) if manifest["replicates"] else []


def names(run_dir: RunDir) -> list[str]:
    """The names of the checkpoints, newest first."""
    return run_dir.checkpoint_names()


def read_newest(
    run_dir: RunDir, ranks: Ranks | None = None, *, training: bool = True
) -> tuple[Snapshot | None, dict[str, str]]:
    """The newest checkpoint that is whole for all ranks, and why each newer one was passed over, by name.

    Without `training`, it is enough that the networks are.
    """
    ranks = ranks or Ranks()
    passed_over: dict[str, str] = {}
    for name in ranks.from_first(lambda: names(run_dir)):
        snapshot, problem = None, None
        folder = bring(run_dir, name, ranks)
        try:
            snapshot = read(folder, ranks.world.rank, ranks.world.size, training=training)
        except Damaged as error:
            problem = str(error)
        problems = [problem for problem in ranks.gather(problem) if problem]
        if _receives(ranks):
            shutil.rmtree(folder.parent, ignore_errors=True)
        if not problems:
            return snapshot, passed_over
        passed_over[name] = problems[0]
    return None, passed_over


def bring(run_dir: RunDir, name: str, ranks: Ranks) -> Path:
    """To every node that does not see rank 0's disk: the checkpoint `name`, for the time being; gives its place."""
    folder = run_dir.checkpoints / name
    if not ranks.apart:
        return folder
    if ranks.far:
        folder = run_dir.brought(ranks.world.nodes().index(ranks.world.node)) / name
    receives = _receives(ranks)
    if receives:
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
    sizes = ranks.from_first(lambda: {path.name: path.stat().st_size for path in sorted(folder.iterdir())})
    for file_name, num_bytes in sizes.items():
        path = folder / file_name
        pieces = ranks.stream_first(_read_pieces(path) if ranks.first else iter(()), num_bytes)
        if receives:
            _write_pieces(path, pieces)
        else:
            deque(pieces, maxlen=0)
    ranks.gather(None)  # nobody reads before all is there
    return folder


def _receives(ranks: Ranks) -> bool:
    """Whether this rank writes what is brought to its node."""
    return ranks.far and ranks.world.rank == ranks.world.node[0]


def _read_pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            yield piece


def retire(run_dir: RunDir, damaged: Iterable[str]) -> None:
    """Keep damaged checkpoints for whoever wants to look, but count them no more."""
    for name in damaged:
        (run_dir.checkpoints / name).rename(run_dir.checkpoints / f"damaged-{name}")


def prune(run_dir: RunDir, keep: int, best: str | None) -> None:
    """Remove all but the newest `keep` and the best."""
    for name in names(run_dir)[keep:]:
        if name != best:
            # Renamed first: a removal that is cut short must not leave something like a checkpoint.
            (run_dir.checkpoints / name).rename(run_dir.checkpoints / f"{_DOOMED}{name}")
    _remove(run_dir, _DOOMED)


def sweep(run_dir: RunDir) -> None:
    """Remove whatever a killed process left half written or half removed."""
    _remove(run_dir, _DOOMED, _BESIDE, RECEIVING)


def _remove(run_dir: RunDir, *prefixes: str) -> None:
    if run_dir.checkpoints.is_dir():
        for entry in run_dir.checkpoints.iterdir():
            if entry.name.startswith(prefixes):
                shutil.rmtree(entry, ignore_errors=True)


def _write_tensors(path: Path, tensors: Tensors) -> dict[str, Any]:
    data = safetensors.torch.save(tensors)
    _write_bytes(path, data)
    return _describe(data)


def _describe(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _read_tensors(path: Path, expected: dict[str, Any]) -> Tensors:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None
    if len(data) != expected["bytes"]:
        raise Damaged(f"{path.name} has {len(data)} bytes instead of {expected['bytes']}")
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise Damaged(f"{path.name} was altered: its SHA-256 is not the manifest's")
    return safetensors.torch.load(data)


def _write_bytes(path: Path, data: bytes) -> None:
    _write_pieces(path, [data])


def _write_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        data = (path / MANIFEST).read_bytes()
        manifest = json.loads(data)
        intact = data == _manifest_bytes(manifest) and manifest.pop("sha256") == _manifest_digest(manifest)
    except FileNotFoundError:
        raise Damaged(f"it has no {MANIFEST}") from None
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        raise Damaged(f"its {MANIFEST} cannot be read") from None
    if not intact:
        raise Damaged(f"its {MANIFEST} was altered")
    if manifest["format"] != FORMAT:
        raise Damaged(f"it has format {manifest['format']}; this fortyfold reads {FORMAT}")
    return manifest  # type: ignore[no-any-return]


def _manifest_bytes(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, indent=2).encode()


def _manifest_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
