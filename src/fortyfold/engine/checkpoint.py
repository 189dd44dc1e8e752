"""Checkpoints: safetensors and a JSON manifest with SHA-256, written beside, fsynced, renamed.

A checkpoint is a folder `step-<steps done>-<attempt>`:

    model.safetensors      the network's state, by timm's own names
    ema.safetensors        the same of its moving average, where the recipe has one
    training.safetensors   optimiser state as optim/state/<parameter>/<name>, generator states as rng/<device>
    manifest.json          progress, the plain part of the rest, size and SHA-256 of the files, of itself too

It is there whole or not at all. A torn or altered one is found by its checksums, named and passed over.
Nothing is pickled, and files are verified and parsed from one read, never mapped: a mapped file that
shrinks kills the process.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from fortyfold.engine.learner import Learner
from fortyfold.engine.progress import Progress
from fortyfold.engine.state_tree import Tensors, flatten, unflatten
from fortyfold.spec.run_dir import RunDir, fsync_folder

FORMAT = 2
MANIFEST = "manifest.json"
MODEL, EMA, TRAINING = "model.safetensors", "ema.safetensors", "training.safetensors"
_BESIDE, _DOOMED = ".writing-", ".removing-"


class Damaged(Exception):
    """A checkpoint that cannot be trusted; the message says why."""


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint in host memory, sharing nothing with the running model."""

    name: str
    progress: Progress
    model: Tensors
    ema: Tensors | None = None
    training: Tensors = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    """What is no tensor of the optimiser's and the loss scaler's state."""


def take_snapshot(name: str, learner: Learner, progress: Progress) -> Snapshot:
    """Copy everything to host memory. The training loop stands still for this, and only for this."""
    optimizer, tensors = flatten(_optimizer_state(learner), "optim")
    tensors |= {f"rng/{device}": state for device, state in _generator_states().items()}
    return Snapshot(
        name=name,
        progress=Progress.from_json(json.loads(json.dumps(progress.to_json()))),
        model=_to_host(learner.model.state_dict()),
        ema=_to_host(learner.ema.module.state_dict()) if learner.ema else None,
        training=_to_host(tensors),
        plain={"optimizer": optimizer, "scaler": learner.scaler.state() if learner.scaler else None},
    )


def restore(snapshot: Snapshot, learner: Learner) -> Progress:
    """Put a snapshot's state into the learner and the generators; gives its progress."""
    learner.model.load_state_dict(snapshot.model)
    if learner.ema is not None:
        assert snapshot.ema is not None
        learner.ema.module.load_state_dict(snapshot.ema)
    _restore_optimizer(learner, unflatten(snapshot.plain["optimizer"], snapshot.training))
    if learner.scaler is not None:
        learner.scaler.restore(snapshot.plain["scaler"])
    torch.set_rng_state(snapshot.training["rng/cpu"])
    if torch.cuda.is_available() and "rng/cuda" in snapshot.training:
        torch.cuda.set_rng_state(snapshot.training["rng/cuda"])
    return snapshot.progress


def write(run_dir: RunDir, snapshot: Snapshot) -> Path:
    """Make the checkpoint durable, then visible. Raises OSError and leaves nothing when it cannot."""
    beside = run_dir.checkpoints / f"{_BESIDE}{snapshot.name}"
    shutil.rmtree(beside, ignore_errors=True)
    run_dir.checkpoints.mkdir(exist_ok=True)
    beside.mkdir()
    try:
        files = {
            name: _write_tensors(beside / name, tensors)
            for name, tensors in ((MODEL, snapshot.model), (EMA, snapshot.ema), (TRAINING, snapshot.training))
            if tensors is not None
        }
        manifest = {
            "format": FORMAT,
            "progress": snapshot.progress.to_json(),
            "plain": snapshot.plain,
            "files": files,
        }
        _write_bytes(beside / MANIFEST, _manifest_bytes({**manifest, "sha256": _manifest_digest(manifest)}))
        fsync_folder(beside)
        beside.rename(run_dir.checkpoints / snapshot.name)
        fsync_folder(run_dir.checkpoints)
        fsync_folder(run_dir.path)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return run_dir.checkpoints / snapshot.name


def read(path: Path, *, training: bool = True) -> Snapshot:
    """A verified checkpoint; raises Damaged. Without `training`, only the networks are read."""
    manifest = _read_manifest(path)
    try:
        wanted = [name for name in manifest["files"] if training or name != TRAINING]
        tensors = {name: _read_tensors(path / name, manifest["files"][name]) for name in wanted}
        return Snapshot(
            name=path.name,
            progress=Progress.from_json(manifest["progress"]),
            model=tensors[MODEL],
            ema=tensors.get(EMA),
            training=tensors.get(TRAINING, {}),
            plain=manifest["plain"],
        )
    except (KeyError, TypeError) as error:
        raise Damaged(f"its manifest is of another kind ({error})") from None


def names(run_dir: RunDir) -> list[str]:
    """The names of the checkpoints, newest first."""
    return run_dir.checkpoint_names()


def read_newest(run_dir: RunDir) -> tuple[Snapshot | None, dict[str, str]]:
    """The newest whole checkpoint, and why each newer one was passed over, by name."""
    passed_over: dict[str, str] = {}
    for name in names(run_dir):
        try:
            return read(run_dir.checkpoints / name), passed_over
        except Damaged as error:
            passed_over[name] = str(error)
    return None, passed_over


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
    sweep(run_dir)


def sweep(run_dir: RunDir) -> None:
    """Remove whatever a killed process left half written or half removed."""
    if not run_dir.checkpoints.is_dir():
        return
    for entry in run_dir.checkpoints.iterdir():
        if entry.name.startswith((_BESIDE, _DOOMED)):
            shutil.rmtree(entry, ignore_errors=True)


def _to_host(tensors: Tensors) -> Tensors:
    return {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in tensors.items()}


def _generator_states() -> Tensors:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _parameter_names(learner: Learner) -> list[str]:
    """Names in the order in which the optimiser counts its parameters."""
    name_of = {id(parameter): name for name, parameter in learner.model.named_parameters()}
    return [name_of[id(parameter)] for group in learner.optimizer.param_groups for parameter in group["params"]]


def _optimizer_state(learner: Learner) -> dict[str, Any]:
    """The optimiser's own state, with parameters by name and without their lists."""
    names, state = _parameter_names(learner), learner.optimizer.state_dict()
    by_name = {names[index]: values for index, values in state["state"].items()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    return {**state, "state": by_name, "param_groups": groups}


def _restore_optimizer(learner: Learner, state: dict[str, Any]) -> None:
    index_of = {name: index for index, name in enumerate(_parameter_names(learner))}
    lists = [group["params"] for group in learner.optimizer.state_dict()["param_groups"]]
    groups = [{**saved, "params": params} for saved, params in zip(state["param_groups"], lists, strict=True)]
    by_index = {index_of[name]: values for name, values in state["state"].items()}
    learner.optimizer.load_state_dict({**state, "state": by_index, "param_groups": groups})


def _write_tensors(path: Path, tensors: Tensors) -> dict[str, Any]:
    data = safetensors.torch.save(tensors)
    _write_bytes(path, data)
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
    with path.open("wb") as file:
        file.write(data)
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
