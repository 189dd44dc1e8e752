"""Whatever a recipe says: three steps, an abrupt end, the same command, three steps more = six steps, bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fortyfold.data.demo import DemoSpec, make_demo
from fortyfold.engine import checkpoint
from fortyfold.engine.learner import Learner
from fortyfold.engine.stop import StopFlag
from fortyfold.engine.train import train
from fortyfold.spec.recipe_file import load_recipe
from fortyfold.spec.run_dir import RunDir

SIX_STEPS = {
    "px": 32, "global_batch": 4, "epochs": 1, "evaluate.every_epochs": 0, "data.threads": 1,
    "checkpoint.every_steps": 3, "checkpoint.every_minutes": 0, "checkpoint.every_epochs": 0,
}  # fmt: skip

OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "fp16": {"precision.dtype": "fp16"},
    "fp16 with a fixed scale": {"precision.dtype": "fp16", "precision.loss_scale": 128.0},
    "tf32": {"precision.tf32": True},
    "deterministic": {"precision.deterministic": True},
    "channels first": {"model.channels_last": False},
    "zero_init_last": {"model.zero_init_last": True},
    "dropout": {"model.drop_rate": 0.3, "model.drop_path_rate": 0.2},
    "blur-pool": {"model.arguments": {"aa_layer": "blur"}},
    "adamw": {"optim.name": "adamw", "optim.lr": 0.001, "optim.arguments": {"betas": [0.8, 0.9]}},
    "accumadam": {"optim.name": "accumadam", "optim.lr": 0.001, "optim.accum_iter": 2},
    "accumadamw": {"optim.name": "accumadamw", "optim.lr": 0.001, "optim.accum_iter": 4},
    "lookahead_lamb": {"optim.name": "lookahead_lamb", "optim.lr": 0.001},
    "muon": {"optim.name": "muon", "optim.lr": 0.001},
    "accumulate": {"accumulate": 2},
    "clip_norm": {"optim.clip_norm": 0.1},
    "clip_value": {"optim.clip_value": 0.01},
    "decay everywhere": {"optim.decay_norm_and_bias": True},
    "decay_by_name": {"optim.decay_by_name": {"fc.*": 0.1, "*.bn1.*": 0.01}},
    "layer_decay": {"optim.layer_decay": 0.7},
    "ema": {"ema.decay": 0.9},
    "ema with warm-up": {"ema.decay": 0.99, "ema.warmup": True},
    "mixup": {"augment.mixup": 0.8},
    "cutmix of pairs": {"augment.cutmix": 1.0, "augment.mix_each": "pair"},
    "both, image by image": {"augment.mixup": 0.8, "augment.cutmix": 1.0, "augment.mix_each": "image"},
    "color_jitter": {"augment.color_jitter": 0.4},
    "RandAugment": {"augment.policy": "rand"},
    "TrivialAugment": {"augment.policy": "trivial"},
    "erase": {"augment.erase": 0.5},
    "erase with the mean": {"augment.erase": 0.5, "augment.erase_fill": "mean"},
    "repeats": {"augment.repeats": 3},
    "bce": {"loss.name": "bce", "loss.label_smoothing": 0.1},
    "bce with threshold": {"loss.name": "bce", "loss.bce_threshold": 0.2, "augment.mixup": 0.5},
    "label_smoothing": {"loss.label_smoothing": 0.1},
    "one_cycle": {"schedule.name": "one_cycle", "schedule.warmup_epochs": 0},
    "polynomial": {"schedule.name": "polynomial"},
    "phases": {
        "epochs": None, "augment.mixup": 0.2,
        "phases": [{"epochs": 1, "px": 32, "global_batch": 8, "lr": [0.01, 0.1]},
                   {"epochs": 1, "px": 48, "global_batch": 10, "accumulate": 2}],
    },
}  # fmt: skip
EVERYTHING = {
    "ema.decay": 0.9, "accumulate": 2, "optim.clip_norm": 1.0, "augment.mixup": 0.5, "augment.cutmix": 0.5,
    "augment.policy": "rand", "augment.erase": 0.3, "augment.repeats": 2, "augment.color_jitter": [0.2, 0.2, 0.2, 0.1],
    "loss.name": "bce", "model.drop_path_rate": 0.1, "optim.name": "accumadamw", "optim.lr": 0.001,
    "evaluate.every_epochs": 1, "evaluate.flip": True,
}  # fmt: skip
OPTIONS["everything"] = EVERYTHING


class Killed(BaseException):
    """Nothing in the engine knows it, and nothing but the run directory is left after it."""


@pytest.fixture(scope="module")
def few_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 for training, 4 for validation."""
    root = tmp_path_factory.mktemp("data") / "few"
    make_demo(root, DemoSpec(classes=4, images=28, width=48, height=48, seed=0))
    return root


@pytest.fixture
def killed_in_step_four(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    whole = Learner.step

    def step(self: Learner, batch: Any, number: int, *arguments: Any) -> torch.Tensor:
        if number == 4:
            whole(self, batch, number, *arguments)
            raise Killed
        return whole(self, batch, number, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", step)
        yield patch


def run(folder: Path, data: Path, changes: dict[str, Any]) -> None:
    recipe = load_recipe("tiny", {**SIX_STEPS, "data.root": str(data), "data.demo": None, **changes})
    outcome = train(recipe, RunDir(folder), StopFlag())
    assert outcome.finished and outcome.progress.step == 6


def last_files(folder: Path) -> dict[str, bytes]:
    path = RunDir(folder).checkpoints / checkpoint.names(RunDir(folder))[0]
    return {entry.name: entry.read_bytes() for entry in path.iterdir() if entry.name != checkpoint.MANIFEST}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_six_steps(
    name: str, dtype: str, few_images: Path, tmp_path: Path, killed_in_step_four: pytest.MonkeyPatch
) -> None:
    changes = OPTIONS[name]
    if dtype == "bf16":
        if "precision.dtype" in changes:
            return
        changes = {**changes, "precision.dtype": "bf16"}
    with pytest.raises(Killed):
        run(tmp_path / "killed", few_images, changes)
    killed_in_step_four.undo()
    assert checkpoint.names(RunDir(tmp_path / "killed")) == ["step-000000003-0001"]
    run(tmp_path / "killed", few_images, changes)
    run(tmp_path / "calm", few_images, changes)
    assert last_files(tmp_path / "killed") == last_files(tmp_path / "calm")
