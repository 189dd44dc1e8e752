"""Guarantee 4: whole or not at all, verified, the previous one used when the newest is damaged."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import skip_or_fail
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from learners import make_learner, make_model, recipe, train_steps
from rank_pool import RankPool

from fortyfold.engine import checkpoint
from fortyfold.engine.checkpoint import EMA, TRAINING, Damaged
from fortyfold.engine.learner import Learner
from fortyfold.engine.learner_state import restore, take_snapshot
from fortyfold.engine.precision import try_compiler
from fortyfold.engine.progress import Progress
from fortyfold.engine.state_tree import flatten, unflatten
from fortyfold.models.timm_import import timm
from fortyfold.spec.errors import RunFailed
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.run_dir import MANIFEST, MODEL, RunDir, write_json


def save(run_dir: RunDir, step: int, learner: Learner) -> Path:
    name = run_dir.checkpoint(step, 1).name
    return checkpoint.write(run_dir, take_snapshot(name, learner, Progress(step=step)))


def tensors_of(learner: Learner) -> dict[str, torch.Tensor]:
    ema = learner.ema.module.state_dict() if learner.ema else {}
    return learner.model.state_dict() | {f"ema.{key}": tensor for key, tensor in ema.items()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run with two whole checkpoints, of steps 1 and 2."""
    run_dir = RunDir(tmp_path_factory.mktemp("pair"))
    learner = make_learner(recipe(ema={"decay": 0.9}))
    for step in (1, 2):
        train_steps(learner, step - 1, step)
        save(run_dir, step, learner)
    return run_dir


def check_going_on(folder: Path, spec: Recipe, saved_after: int) -> None:
    """Three steps (or none), a checkpoint, another learner: the end is the same, bit for bit."""
    learner = make_learner(spec)
    if spec.precision.compile:
        learner.compile()
    train_steps(learner, 0, saved_after)
    path = save(RunDir(folder), saved_after, learner)
    train_steps(learner, saved_after, 6)

    other = make_learner(spec, seed=1)
    if spec.precision.compile:
        other.compile()
    train_steps(other, 0, 1)  # whatever was there before is gone
    progress = restore(checkpoint.read(path), other)
    assert progress.step == saved_after
    train_steps(other, saved_after, 6)
    expected = tensors_of(learner)
    assert not torch.equal(expected["0.weight"], make_learner(spec).model.state_dict()["0.weight"])
    for key, tensor in tensors_of(other).items():
        assert torch.equal(tensor, expected[key]), key


ELSEWHERE = {name for name in timm.optim.list_optimizers() if name.startswith(("bnb", "fused"))}  # want a GPU
NAMES = {*timm.optim.list_optimizers(), "accumadam", "accumadamw", "lookahead_radam"} - ELSEWHERE - {"adahessian"}


@pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum':UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_optimiser_goes_on_from_a_checkpoint_as_if_nothing_had_been(tmp_path: Path, name: str) -> None:
    check_going_on(tmp_path, recipe(optim={"name": name, "lr": 0.01, "weight_decay": 0.1}), 3)


@pytest.mark.parametrize("saved_after", [0, 3])
def test_so_do_ema_and_loss_scaler(tmp_path: Path, saved_after: int) -> None:
    check_going_on(tmp_path, recipe(ema={"decay": 0.9}, precision={"dtype": "fp16"}), saved_after)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_so_does_a_compiled_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    if (problem := try_compiler(torch.device("cpu"))) is not None:
        skip_or_fail("compiler", problem)
    check_going_on(tmp_path, recipe(precision={"compile": True}), 3)


def test_a_snapshot_shares_nothing_with_the_learner(pair: RunDir) -> None:
    learner = make_learner(recipe(ema={"decay": 0.9}))
    train_steps(learner, 0, 1)
    progress = Progress(step=1, quarantined=[5])
    snapshot = take_snapshot("x", learner, progress)
    assert snapshot.ema is not None
    held = {**snapshot.model, **snapshot.training, **{f"ema.{key}": value for key, value in snapshot.ema.items()}}
    copies = {key: tensor.clone() for key, tensor in held.items()}
    train_steps(learner, 1, 3)
    progress.quarantined.append(6)
    for key, tensor in held.items():
        assert torch.equal(tensor, copies[key]), key
    assert snapshot.progress.quarantined == [5]


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.permutations(range(4)).map(lambda order: torch.arange(120.0).view(2, 3, 4, 5).permute(order)),
    st.integers(-5, 5).map(torch.tensor),
)  # fmt: skip
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.from_regex("[a-z0-9/.]{1,6}", fullmatch=True), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(TREES)
def test_nested_state_survives_the_way_through_json(state: Any) -> None:
    plain, tensors = flatten(state, "x")
    again = unflatten(json.loads(json.dumps(plain)), {key: tensor.contiguous() for key, tensor in tensors.items()})
    assert_alike(again, state)


def assert_alike(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other) and one.stride() == other.stride() and one.dtype == other.dtype
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_alike(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_alike(a, b)
    else:
        assert one == other


def test_what_no_checkpoint_can_hold_is_named() -> None:
    with pytest.raises(TypeError, match="optim/state/w is a object"):
        flatten({"state": {"w": object()}}, "optim")


@given(st.sampled_from([MODEL, EMA, TRAINING, MANIFEST]), st.integers(0, 10**9), st.integers(1, 255))
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
    monkeypatch.setattr(checkpoint, "FORMAT", 4)
    with pytest.raises(Damaged, match="it has format 3; this fortyfold reads 4"):
        checkpoint.read(pair.checkpoints / checkpoint.names(pair)[0])


def test_pruning_keeps_the_newest_and_the_best_and_sweeps_up(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for step in range(6):
        run_dir.checkpoint(step, 1).mkdir(parents=True)
    (run_dir.checkpoints / ".writing-step-000000009-0001").mkdir()
    (run_dir.checkpoints / ".removing-step-000000008-0001").mkdir()
    checkpoint.prune(run_dir, keep=2, best=run_dir.checkpoint(1, 1).name)
    kept = [run_dir.checkpoint(step, 1).name for step in (1, 4, 5)]
    left = sorted(path.name for path in run_dir.checkpoints.iterdir())
    assert left == [".writing-step-000000009-0001", *kept]  # some rank may be at it
    checkpoint.sweep(run_dir)
    assert sorted(path.name for path in run_dir.checkpoints.iterdir()) == kept


def test_a_write_that_fails_leaves_nothing(pair: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path)
    learner = make_learner(recipe())

    def fail(path: Path, data: bytes) -> None:
        path.write_bytes(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_bytes", fail)
    with pytest.raises(OSError, match="No space"):
        save(run_dir, 1, learner)
    assert list(run_dir.checkpoints.iterdir()) == []


def test_the_model_file_is_plain_safetensors_by_the_models_own_names(pair: RunDir) -> None:
    import safetensors.torch

    path = pair.checkpoints / checkpoint.names(pair)[0] / MODEL
    assert safetensors.torch.load_file(path).keys() == make_model().state_dict().keys()


def test_a_writer_that_another_attempt_has_replaced_publishes_nothing(tmp_path: Path) -> None:
    """Where locks do not work (some network disks), run.json says whose turn it is."""
    run_dir, learner = RunDir(tmp_path), make_learner(recipe())
    write_json(run_dir.spec, {"attempt": 1})
    save(run_dir, 2, learner)
    write_json(run_dir.spec, {"attempt": 2})
    with pytest.raises(RunFailed, match=r"^attempt 2 has taken over .*; this one saves nothing any more$"):
        save(run_dir, 4, learner)
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step-000000002-0001"]


def test_only_who_does_not_see_the_first_nodes_disk_is_sent_a_checkpoint(
    three_ranks: RankPool, pair: RunDir, tmp_path: Path
) -> None:
    """Whatever the site says of disks: of three nodes two share one, and the third has something of its own."""
    first, other = RunDir(tmp_path / "first"), RunDir(tmp_path / "other")
    shutil.copytree(pair.path, first.path)
    other.checkpoint(7, 1).mkdir(parents=True)
    runs = [str(first.path), str(first.path), str(other.path)]
    answers = three_ranks.run("read_newest", runs=runs, nodes=[1, 1, 1])
    assert answers == [[False, True, 2], [False, True, 2], [True, True, 2]]
    assert first.checkpoint_names() == pair.checkpoint_names()
    assert other.checkpoint_names() == ["step-000000007-0001"]  # nothing is removed
    assert [path.name for path in other.path.iterdir()] == ["checkpoints"] and not list(first.launch.iterdir())


def test_ranks_of_a_far_node_pass_over_a_damaged_one_together(
    three_ranks: RankPool, pair: RunDir, tmp_path: Path
) -> None:
    first, other = RunDir(tmp_path / "first"), RunDir(tmp_path / "other")
    shutil.copytree(pair.path, first.path)
    (first.checkpoints / first.checkpoint_names()[0] / MANIFEST).write_text("torn")
    for _ in range(10):
        answers = three_ranks.run("read_newest", runs=[str(first.path), *[str(other.path)] * 2], nodes=[1, 2])
        assert answers == [[False, True, 1], [True, True, 1], [True, True, 1]]
