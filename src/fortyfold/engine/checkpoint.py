"""Checkpoints: safetensors and a JSON manifest with SHA-256, written beside, fsynced, renamed.

A checkpoint is a folder `step-<steps done>-<attempt>`:

    model.safetensors      the network's state, by timm's own names
    training.safetensors   optimiser state as optim/<parameter>/<name>, generator states as rng/<device>
    manifest.json          progress, the optimiser's plain values, size and SHA-256 of the files, of itself too

It is there whole or not at all. A torn or altered one is found by its checksums, named and passed over.
Nothing is pickled, and files are verified and parsed from one read, never mapped: a mapped file that
shrinks kills the process.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from fortyfold.engine.progress import Progress
from fortyfold.spec.run_dir import RunDir, fsync_folder

FORMAT = 1
MANIFEST = "manifest.json"
MODEL, TRAINING = "model.safetensors", "training.safetensors"
_NAME = re.compile(r"step-(\d+)-(\d+)")
_BESIDE, _DOOMED = ".writing-", ".removing-"

Tensors = dict[str, torch.Tensor]


class Damaged(Exception):
    """A checkpoint that cannot be trusted; the message says why."""


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint in host memory, sharing nothing with the running model."""

    name: str
    progress: Progress
    model: Tensors
    training: Tensors = field(default_factory=dict)
    optimizer_values: dict[str, Any] = field(default_factory=dict)


def take_snapshot(name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> Snapshot:
    """Copy everything to host memory. The training loop stands still for this, and only for this."""
    tensors, values = _optimizer_state(model, optimizer)
    tensors |= {f"rng/{device}": state for device, state in _generator_states().items()}
    return Snapshot(
        name=name,
        progress=Progress.from_json(json.loads(json.dumps(progress.to_json()))),
        model={key: _to_host(tensor) for key, tensor in model.state_dict().items()},
        training={key: _to_host(tensor) for key, tensor in tensors.items()},
        optimizer_values=values,
    )


def restore(snapshot: Snapshot, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Put a snapshot's state into model, optimiser and generators; gives its progress."""
    model.load_state_dict(snapshot.model)
    _restore_optimizer(snapshot, model, optimizer)
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
            for name, tensors in ((MODEL, snapshot.model), (TRAINING, snapshot.training))
        }
        manifest = {
            "format": FORMAT,
            "progress": snapshot.progress.to_json(),
            "optimizer": snapshot.optimizer_values,
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
    """A verified checkpoint; raises Damaged. Without `training`, only the model is read."""
    manifest = _read_manifest(path)
    try:
        wanted = (MODEL, TRAINING) if training else (MODEL,)
        tensors = {name: _read_tensors(path / name, manifest["files"][name]) for name in wanted}
        return Snapshot(
            name=path.name,
            progress=Progress.from_json(manifest["progress"]),
            model=tensors[MODEL],
            training=tensors.get(TRAINING, {}),
            optimizer_values=manifest["optimizer"],
        )
    except (KeyError, TypeError) as error:
        raise Damaged(f"its manifest is of another kind ({error})") from None


def names(run_dir: RunDir) -> list[str]:
    """The names of the checkpoints, newest first."""
    if not run_dir.checkpoints.is_dir():
        return []
    matches = (_NAME.fullmatch(entry.name) for entry in run_dir.checkpoints.iterdir())
    found = [(int(match[1]), int(match[2]), match[0]) for match in matches if match]
    return [name for _, _, name in sorted(found, reverse=True)]


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


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _generator_states() -> Tensors:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names in the order in which the optimiser counts its parameters."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [name_of[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensors, dict[str, Any]]:
    names = _parameter_names(model, optimizer)
    state = optimizer.state_dict()
    tensors: Tensors = {}
    plain: dict[str, Any] = {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optim/{names[index]}/{key}"] = value
            else:
                plain[f"{names[index]}/{key}"] = value
    groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    return tensors, json.loads(json.dumps({"plain": plain, "groups": groups}))


def _restore_optimizer(snapshot: Snapshot, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    index_of = {name: index for index, name in enumerate(_parameter_names(model, optimizer))}
    parameters = dict(model.named_parameters())
    state: dict[int, dict[str, Any]] = {}
    for path, tensor in snapshot.training.items():
        if path.startswith("optim/"):
            name, _, key = path.removeprefix("optim/").rpartition("/")
            state.setdefault(index_of[name], {})[key] = _laid_out_like(parameters[name], tensor)
    for path, value in snapshot.optimizer_values["plain"].items():
        name, _, key = path.rpartition("/")
        state.setdefault(index_of[name], {})[key] = value
    current = optimizer.state_dict()["param_groups"]
    groups = [
        {**group, **{key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()}}
        for group, saved in zip(current, snapshot.optimizer_values["groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _laid_out_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """In the parameter's memory order: vectorised kernels may round otherwise in another one."""
    if tensor.shape != parameter.shape:
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, device="cpu").copy_(tensor)


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
