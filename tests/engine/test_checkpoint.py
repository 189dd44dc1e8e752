"""Guarantee 4: whole or not at all, verified, the previous one used when the newest is damaged."""

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fortyfold.engine import checkpoint
from fortyfold.engine.checkpoint import MANIFEST, MODEL, TRAINING, Damaged
from fortyfold.engine.optimizer import build_optimizer
from fortyfold.engine.progress import Progress
from fortyfold.spec.recipe import Optim
from fortyfold.spec.run_dir import RunDir


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.Dropout(0.3),
        torch.nn.Flatten(),
        torch.nn.Linear(288, 4),
    )
    return layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def train_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        loss = model(images.to(memory_format=torch.channels_last)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def save(run_dir: RunDir, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    name = run_dir.checkpoint(step, 1).name
    return checkpoint.write(run_dir, checkpoint.take_snapshot(name, model, optimizer, Progress(step=step)))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run with two whole checkpoints, of steps 1 and 2."""
    run_dir = RunDir(tmp_path_factory.mktemp("pair"))
    model = make_model()
    optimizer = build_optimizer(model, Optim(lr=0.1))
    for step in (1, 2):
        train_steps(model, optimizer, step - 1, step)
        save(run_dir, step, model, optimizer)
    return run_dir


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adam", "adamw"])
@pytest.mark.parametrize("saved_after", [0, 3])
def test_going_on_from_a_checkpoint_is_going_on(tmp_path: Path, name: str, saved_after: int) -> None:
    optim = Optim(name=name, lr=0.01, weight_decay=0.1)
    run_dir = RunDir(tmp_path)
    model = make_model()
    optimizer = build_optimizer(model, optim)
    train_steps(model, optimizer, 0, saved_after)
    path = save(run_dir, saved_after, model, optimizer)
    train_steps(model, optimizer, saved_after, 6)

    other = make_model(seed=1)
    other_optimizer = build_optimizer(other, optim)
    train_steps(other, other_optimizer, 0, 1)  # whatever was there before is gone
    progress = checkpoint.restore(checkpoint.read(path), other, other_optimizer)
    assert progress.step == saved_after
    train_steps(other, other_optimizer, saved_after, 6)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key]), key


def test_a_snapshot_shares_nothing_with_the_model(pair: RunDir) -> None:
    model = make_model()
    optimizer = build_optimizer(model, Optim(lr=0.1))
    train_steps(model, optimizer, 0, 1)
    progress = Progress(step=1, quarantined=[5])
    snapshot = checkpoint.take_snapshot("x", model, optimizer, progress)
    copies = {key: tensor.clone() for key, tensor in (snapshot.model | snapshot.training).items()}
    train_steps(model, optimizer, 1, 3)
    progress.quarantined.append(6)
    for key, tensor in (snapshot.model | snapshot.training).items():
        assert torch.equal(tensor, copies[key]), key
    assert snapshot.progress.quarantined == [5]


@given(st.sampled_from([MODEL, TRAINING, MANIFEST]), st.integers(0, 10**9), st.integers(1, 255))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_flipped_byte_anywhere_is_found_and_the_previous_one_used(
    pair: RunDir, file: str, position: int, mask: int
) -> None:
    newest = checkpoint.names(pair)[0]
    path = pair.checkpoints / newest / file
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[position % len(whole)] ^= mask
    path.write_bytes(damaged)
    try:
        snapshot, passed_over = checkpoint.read_newest(pair)
    finally:
        path.write_bytes(whole)
    assert snapshot is not None and snapshot.progress.step == 1
    assert list(passed_over) == [newest]


@given(st.sampled_from([MODEL, TRAINING, MANIFEST]), st.integers(0, 10**9))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_truncated_file_is_found_and_the_previous_one_used(pair: RunDir, file: str, size: int) -> None:
    path = pair.checkpoints / checkpoint.names(pair)[0] / file
    whole = path.read_bytes()
    path.write_bytes(whole[: size % len(whole)])
    try:
        snapshot, passed_over = checkpoint.read_newest(pair)
    finally:
        path.write_bytes(whole)
    assert snapshot is not None and snapshot.progress.step == 1
    assert len(passed_over) == 1


@pytest.mark.parametrize("file", [MODEL, TRAINING, MANIFEST])
def test_a_missing_file_is_named(pair: RunDir, tmp_path: Path, file: str) -> None:
    copy = tmp_path / "step-copy"
    shutil.copytree(pair.checkpoints / checkpoint.names(pair)[0], copy)
    (copy / file).unlink()
    with pytest.raises(Damaged, match=file):
        checkpoint.read(copy)


def test_with_no_whole_one_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert checkpoint.read_newest(run_dir) == (None, {})
    run_dir.checkpoint(7, 1).mkdir(parents=True)
    snapshot, passed_over = checkpoint.read_newest(run_dir)
    assert snapshot is None
    assert passed_over == {"step-000000007-0001": "it has no manifest.json"}


def test_only_names_of_checkpoints_count_and_by_their_numbers(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for name in (
        "step-000000008-0001",
        "step-000000008-0001.bak",
        "step-old",
        "step-1000000000-0001",
        "step-000000008-10000",
    ):
        (run_dir.checkpoints / name).mkdir(parents=True)
    assert checkpoint.names(run_dir) == ["step-1000000000-0001", "step-000000008-10000", "step-000000008-0001"]


def test_another_format_is_passed_over(pair: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    with pytest.raises(Damaged, match="it has format 1; this fortyfold reads 2"):
        checkpoint.read(pair.checkpoints / checkpoint.names(pair)[0])


def test_pruning_keeps_the_newest_and_the_best_and_sweeps_up(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for step in range(6):
        run_dir.checkpoint(step, 1).mkdir(parents=True)
    (run_dir.checkpoints / ".writing-step-000000009-0001").mkdir()
    (run_dir.checkpoints / ".removing-step-000000008-0001").mkdir()
    checkpoint.prune(run_dir, keep=2, best=run_dir.checkpoint(1, 1).name)
    left = sorted(path.name for path in run_dir.checkpoints.iterdir())
    assert left == [run_dir.checkpoint(step, 1).name for step in (1, 4, 5)]


def test_a_write_that_fails_leaves_nothing(pair: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path)
    model = make_model()
    optimizer = build_optimizer(model, Optim(lr=0.1))

    def fail(path: Path, data: bytes) -> None:
        path.write_bytes(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_bytes", fail)
    with pytest.raises(OSError, match="No space"):
        save(run_dir, 1, model, optimizer)
    assert list(run_dir.checkpoints.iterdir()) == []


def test_the_model_file_is_plain_safetensors_by_the_models_own_names(pair: RunDir) -> None:
    import safetensors.torch

    path = pair.checkpoints / checkpoint.names(pair)[0] / MODEL
    assert safetensors.torch.load_file(path).keys() == make_model().state_dict().keys()
