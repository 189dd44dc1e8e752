"""Whole runs on several ranks that stay in their processes: going on, agreeing, and the same training on any number."""

import json
import shutil
from pathlib import Path
from typing import Any

import kill_resume
import numpy as np
import pytest
import torch
from rank_pool import RankPool

from fortyfold.engine import checkpoint
from fortyfold.spec.events import Event, read_events
from fortyfold.spec.ranks import read_merged_steps
from fortyfold.spec.records import read_steps
from fortyfold.spec.run_dir import RunDir

SAVE_THIRD = {"checkpoint.every_steps": 3, "checkpoint.every_epochs": 0, "checkpoint.best": False}
SIX_STEPS = {"global_batch": 8, "epochs": 2, **SAVE_THIRD}
TWO_PIECES = {"accumulate": 2, "global_batch": 12, "epochs": 3}  # six steps, too
OPTIONS: dict[str, dict[str, Any]] = {
    "allreduce": {"ema.decay": 0.9, "model.drop_path_rate": 0.2},
    "allreduce compressed": {"strategy.compress": "bf16", "optim.clip_norm": 0.1, **TWO_PIECES},
    "allreduce fp16": {"precision.dtype": "fp16", "optim.name": "accumadamw", "optim.lr": 0.001},
    "allreduce synchronised": {"strategy.sync_bn": True, "augment.mixup": 0.5},
    "allreduce reestimated": {"strategy.bn": "reestimate", "strategy.bn_batches": 2},
    "gossip": {"strategy.name": "gossip", "ema.decay": 0.9},
    "gossip clipped": {"strategy.name": "gossip", "strategy.topology": "ring", "optim.clip_norm": 0.1, **TWO_PIECES},
    "gossip accumadam": {
        "strategy.name": "gossip", "strategy.topology": "matching", "optim.name": "accumadamw", "optim.lr": 0.001,
        "strategy.bn": "reestimate", "strategy.bn_batches": 2, "strategy.local_scores": True,
    },
    "gossip bf16": {"strategy.name": "gossip", "precision.dtype": "bf16", "strategy.topology": "alternating_exp_ring"},
    "gossip fp16 lamb": {"strategy.name": "gossip", "precision.dtype": "fp16", "optim.name": "lamb"},
    "localsgd": {"strategy.name": "localsgd", "strategy.sync_every": 4, "model.drop_path_rate": 0.2},
    "diloco": {
        "strategy.name": "localsgd", "strategy.sync_every": 4, "strategy.outer": "nesterov", "optim.name": "adamw",
        "optim.lr": 0.001,
    },
}  # fmt: skip


def run(pool: RankPool, data: Path, out: Path, changes: dict[str, Any], **how: Any) -> dict[str, Any]:
    """`tiny` on the pool's ranks, which must all say the same."""
    answers = pool.run("train_tiny", data=str(data), out=str(out), changes=changes, **how)
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]  # type: ignore[no-any-return]


def events_of(run_dir: RunDir, kind: str, rank: int = 0) -> list[Event]:
    return [event for event in read_events(run_dir.events(rank)) if event["kind"] == kind]


@pytest.mark.parametrize("name", OPTIONS)
def test_three_steps_and_three_are_six(three_ranks: RankPool, few_data: Path, tmp_path: Path, name: str) -> None:
    calm, struck = RunDir(tmp_path / "calm"), RunDir(tmp_path / "struck")
    changes = SIX_STEPS | OPTIONS[name]
    assert run(three_ranks, few_data, calm.path, changes)["finished"]
    assert run(three_ranks, few_data, struck.path, changes, kill_after=5) == {"killed": True}
    assert checkpoint.names(struck) == ["step-000000003-0001"]
    assert run(three_ranks, few_data, struck.path, changes)["finished"]
    assert kill_resume.fingerprint(struck) == kill_resume.fingerprint(calm)
    snapshots = [checkpoint.read(calm.checkpoints / checkpoint.names(calm)[0], rank, 3) for rank in range(3)]
    weights = [own.tensors["model/fc.weight"] for snapshot in snapshots for own in snapshot.own if snapshot.replicates]
    if weights:  # each rank has weights of its own, and what is evaluated is their mean
        assert not any(weights[0].equal(other) for other in weights[1:])
        assert snapshots[0].model["fc.weight"].allclose(torch.stack(weights).mean(0), atol=1e-6)
        evaluated = events_of(calm, "evaluated")[-1]
        assert 0 < evaluated["consensus_distance"] < 1
        if "strategy.local_scores" in changes:
            assert len(evaluated["local_top1"]) == 3
    assert bool(weights) == ("strategy.name" in changes)


NORM_FREE = {"model.name": "test_vit", "model.arguments": {"img_size": 32}, "global_batch": 20, "epochs": 4}


def test_the_same_training_on_one_two_and_three_ranks(
    two_ranks: RankPool, three_ranks: RankPool, tiny_data: Path, tmp_path: Path
) -> None:
    """The same samples at the same step, mixed alike; the loss within rounding; evaluation counts each image once."""
    changes = NORM_FREE | {"augment.mixup": 0.2, "augment.cutmix": 1.0, "augment.mix_each": "pair", "optim.lr": 0.01}
    for name, pool in (("two", two_ranks), ("three", three_ranks)):
        assert run(pool, tiny_data, tmp_path / name, changes)["finished"]
    one = three_ranks_alone(tiny_data, tmp_path / "one", changes)
    expected = read_merged_steps(one)
    assert len(expected) == 52
    for name in ("two", "three"):
        records = read_merged_steps(RunDir(tmp_path / name))
        assert records["samples_digest"].tolist() == expected["samples_digest"].tolist()
        assert records["images"].tolist() == expected["images"].tolist()
        np.testing.assert_allclose(records["loss"][:50], expected["loss"][:50], rtol=1e-4)
        counts = [(event["num_images"], event["top1"]) for event in events_of(RunDir(tmp_path / name), "evaluated")]
        assert counts == [(event["num_images"], event["top1"]) for event in events_of(one, "evaluated")]


def three_ranks_alone(data: Path, out: Path, changes: dict[str, Any]) -> RunDir:
    """The same run on one rank, in this process."""
    from fortyfold.engine.train import train
    from fortyfold.spec.recipe_file import load_recipe
    from fortyfold.spec.stop import StopFlag

    spec = load_recipe("tiny", {"data.root": str(data), "data.demo": None, **changes})
    assert train(spec, RunDir(out), StopFlag()).finished
    return RunDir(out)


@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "localsgd"])
def test_a_run_goes_on_with_another_number_of_ranks(
    two_ranks: RankPool, three_ranks: RankPool, tiny_data: Path, tmp_path: Path, strategy: str
) -> None:
    """Three ranks, then two, then one, then three, each stopped in the middle of an epoch."""
    changes = NORM_FREE | {"strategy.name": strategy, "epochs": 1, "ema.decay": 0.9, "checkpoint.every_epochs": 0}
    run_dir = RunDir(tmp_path / "run")
    assert run(three_ranks, tiny_data, run_dir.path, changes, stop_after=(1, 3), hurried=True)["reason"] == "terminated"
    assert run(two_ranks, tiny_data, run_dir.path, changes, stop_after=(0, 7), hurried=True)["reason"] == "terminated"
    assert run(three_ranks, tiny_data, run_dir.path, changes)["finished"]
    records = read_merged_steps(run_dir)
    assert records["step"].tolist() == list(range(13)) and records["images"].sum() == 250
    calm = three_ranks_alone(tiny_data, tmp_path / "calm", changes | {"strategy.name": "allreduce"})
    assert records["samples_digest"].tolist() == read_merged_steps(calm)["samples_digest"].tolist()
    noted = [event["message"] for event in events_of(run_dir, "noted")]
    assert len(noted) == 2 and "going on with 2 ranks instead of 3" in noted[0]
    assert ("the mean of 3 ranks' weights" in noted[0]) == (strategy != "allreduce")
    assert events_of(run_dir, "evaluated")[-1]["num_images"] == 50
    if strategy == "allreduce":
        loss = read_merged_steps(calm)["loss"]
        np.testing.assert_allclose(records["loss"], loss, rtol=1e-3)


def test_one_rank_is_asked_to_stop_and_all_stop_in_the_same_step(
    three_ranks: RankPool, tiny_data: Path, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "run")
    answer = run(three_ranks, tiny_data, run_dir.path, {"epochs": 200}, stop_after=(2, 10))
    assert not answer["finished"] and answer["reason"] == "terminated" and answer["step"] > 10
    marker = json.loads(run_dir.stopped.read_text())
    assert (marker["reason"], marker["step"]) == ("terminated", answer["step"])
    assert checkpoint.names(run_dir)[0].startswith(f"step-{answer['step']:09d}")
    assert all(len(read_steps(run_dir.steps(rank))) == answer["step"] for rank in range(3))


def test_a_loss_that_is_not_finite_ends_all_ranks_in_the_same_step(
    three_ranks: RankPool, tiny_data: Path, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "run")
    answer = run(
        three_ranks, tiny_data, run_dir.path, {"epochs": 100, "evaluate.every_epochs": 50}, not_a_number=(1, 9)
    )
    assert "the loss of step 9 is nan" in answer["failed"]
    lengths = {len(read_steps(run_dir.steps(rank))) for rank in range(3)}
    assert len(lengths) == 1, "ranks ended in different steps"
    assert all(events_of(run_dir, "diverged", rank) for rank in range(3))
    for name in checkpoint.names(run_dir):
        assert int(name.split("-")[1]) <= 9


def test_unreadable_images_of_all_ranks_count(three_ranks: RankPool, tiny_data: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_data, tmp_path / "data")
    (tmp_path / "data" / "made.json").unlink()
    for path in sorted((tmp_path / "data" / "train").glob("*/*.jpg"))[::25][:9]:
        path.write_bytes(b"junk")
    for path in sorted((tmp_path / "data" / "val").glob("*/*.jpg"))[::25]:
        path.write_bytes(b"junk")
    run_dir, changes = RunDir(tmp_path / "run"), {"data.bad_image_budget": 0.04, "epochs": 2}
    assert run(three_ranks, tmp_path / "data", run_dir.path, changes)["finished"]
    saved = checkpoint.read(run_dir.checkpoints / checkpoint.names(run_dir)[0], training=False)
    assert len(saved.progress.quarantined) == len(set(saved.progress.quarantined)) == 9
    assert read_merged_steps(run_dir)["images"].sum() == 2 * 241
    evaluated = events_of(run_dir, "evaluated")[-1]
    assert (evaluated["num_images"], len(evaluated["unreadable"])) == (48, 2)


def test_the_python_api_joins_the_ranks(two_ranks: RankPool, tiny_data: Path, tmp_path: Path) -> None:
    first, second = two_ranks.run("train_by_the_api", out=str(tmp_path / "run"), data=str(tiny_data))
    assert first["finished"] and second["finished"]
    assert first["heard"][-1] == "finished" and second["heard"] == []
    assert events_of(RunDir(tmp_path / "run"), "started")[0]["ranks"] == 2


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_scores_do_not_depend_on_the_number_of_ranks(
    two_ranks: RankPool, three_ranks: RankPool, tiny_data: Path, tmp_path: Path, num_ranks: int
) -> None:
    """On fixed weights; sizes that do not divide, rectangles and mirror images too."""
    changes = NORM_FREE | {
        "epochs": 1,
        "model.name": "test_resnet",
        "model.arguments": {},
        "evaluate.rectangular": True,
    }
    run_dir = three_ranks_alone(tiny_data, tmp_path / "run", changes)
    pool = two_ranks if num_ranks == 2 else three_ranks
    answers = pool.run("scores", run=str(run_dir.path))
    assert all(answer == answers[0] for answer in answers)
    from fortyfold.engine.scoring import open_scoring

    alone = open_scoring(run_dir.path, None, None, False).run(lambda done, total: None, flip=True)
    assert answers[0].keys() == alone.keys()
    for name, score in alone.items():
        assert answers[0][name][:2] == [score.num_images, score.top1]
        assert answers[0][name][2] == pytest.approx(score.loss, rel=1e-5)
