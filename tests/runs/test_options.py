"""Whatever a recipe says: three steps, an abrupt end, the same command, three steps more = six steps, bit for bit."""

import csv
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import start

from fortyfold.data.demo import DemoSpec, make_demo
from fortyfold.engine import checkpoint
from fortyfold.engine.device import DeviceBatch
from fortyfold.engine.learner import Learner
from fortyfold.engine.train import train
from fortyfold.spec.events import read_events
from fortyfold.spec.recipe_file import load_recipe
from fortyfold.spec.records import read_steps
from fortyfold.spec.run_dir import MANIFEST, MODEL, RunDir
from fortyfold.spec.stop import StopFlag

Fortyfold = Callable[..., tuple[int, str, str]]

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
    "zero_init_last": {"model.zero_init_last": False},
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
    "constant": {"schedule.name": "constant"},
    "linear": {"schedule.name": "linear"},
    "step": {"schedule.name": "step", "schedule.step_epochs": 1, "epochs": 2, "global_batch": 8},
    "mixup now and then": {"augment.mixup": 0.8, "augment.mix_share": 0.5, "augment.mix_epochs": 1},
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


ON_A_CPU_NOTHING = {"nothing", "tf32", "deterministic"}
IN_BF16 = [  # what autocast meets: layers, losses, gradients, states; not schedules, groups or what the readers do
    "nothing", "channels first", "dropout", "blur-pool", "adamw", "accumadamw", "lookahead_lamb", "muon", "accumulate",
    "clip_norm", "ema", "mixup", "cutmix of pairs", "erase", "bce with threshold", "label_smoothing", "phases",
    "everything",
]  # fmt: skip
CASES = [*((name, "fp32") for name in OPTIONS), *((name, "bf16") for name in IN_BF16)]


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
    whole = Learner.update

    def update(self: Learner, number: int) -> None:
        whole(self, number)
        if number == 4:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", update)
        yield patch


def run(folder: Path, data: Path, changes: dict[str, Any]) -> None:
    recipe = load_recipe("tiny", {**SIX_STEPS, "data.root": str(data), "data.demo": None, **changes})
    outcome = train(recipe, RunDir(folder), StopFlag())
    assert outcome.finished and outcome.progress.step == 6


def last_files(folder: Path) -> dict[str, bytes]:
    path = RunDir(folder).checkpoints / checkpoint.names(RunDir(folder))[0]
    return {entry.name: entry.read_bytes() for entry in path.iterdir() if entry.name != MANIFEST}


@pytest.fixture(scope="module")
def plain_weights(few_images: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Of the run without any option."""
    folder = tmp_path_factory.mktemp("plain")
    run(folder, few_images, {})
    return last_files(folder)[MODEL]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_six_steps(
    name: str, dtype: str, few_images: Path, tmp_path: Path, plain_weights: bytes,
    killed_in_step_four: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    changes = OPTIONS[name] if dtype == "fp32" else {**OPTIONS[name], "precision.dtype": dtype}
    with pytest.raises(Killed):
        run(tmp_path / "killed", few_images, changes)
    killed_in_step_four.undo()
    assert checkpoint.names(RunDir(tmp_path / "killed")) == ["step-000000003-0001"]
    run(tmp_path / "killed", few_images, changes)
    run(tmp_path / "calm", few_images, changes)
    assert last_files(tmp_path / "killed") == last_files(tmp_path / "calm")
    ema_only = name.startswith("ema") and dtype == "fp32"
    same = last_files(tmp_path / "calm")[MODEL] == plain_weights
    assert same == ((name in ON_A_CPU_NOTHING and dtype == "fp32") or ema_only)  # every other option does something


def test_without_a_compiler_it_goes_without(few_images: Path, tmp_path: Path) -> None:
    changes = [f"--set={key}={value}" for key, value in SIX_STEPS.items() if key != "evaluate.every_epochs"]
    process = start(
        "train", "tiny", "--data", few_images, "--out", tmp_path / "run", *changes, "--set", "precision.compile=true",
        env={**os.environ, "CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert re.search(
        r"^note: torch.compile does not work here \(.*compiler.*\); going on without it$", out, re.MULTILINE
    )


class TestOutOfMemory:
    """A model that is full with more than three images at once."""

    @pytest.fixture(autouse=True)
    def small_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = Learner._backward

        def limited(self: Learner, batch: DeviceBatch, num_places: int) -> torch.Tensor:
            loss = forward(self, batch, num_places)  # too late: statistics and gradients have changed
            if len(batch) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return loss

        monkeypatch.setattr(Learner, "_backward", limited)

    def test_it_is_one_line_with_what_to_try(self, few_images: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
        code, _, err = fortyfold("train", "tiny", "--data", few_images, "--out", tmp_path, "--set", "global_batch=12")
        assert code == 1
        assert err == (
            "fortyfold: out of memory in phase 0: test_resnet with 12 images of 32 px a step, in 1 micro-batch a rank; "
            "try --auto-accumulate, which goes on from the last checkpoint; or start anew with accumulate = 2, "
            'precision.dtype = "bf16", or a smaller px\n'
        )

    def test_auto_accumulate_keeps_the_batch_and_is_kept(
        self, few_images: Path, tmp_path: Path, fortyfold: Fortyfold
    ) -> None:
        """The result is that of a run that had accumulate = 4 from the start."""
        common = ("train", "tiny", "--data", few_images, "--set", "global_batch=12", "--epochs", 2)
        code, out, err = fortyfold(*common, "--out", tmp_path / "auto", "--auto-accumulate")
        assert (code, err) == (0, "")
        assert "out of memory in phase 0, 12 images of 32 px a step: going on in 2 micro-batches" in out
        assert "going on in 4 micro-batches" in out
        code, _, err = fortyfold(*common, "--out", tmp_path / "known", "--set", "accumulate=4")
        assert (code, err) == (0, "")
        assert last_files(tmp_path / "auto") == last_files(tmp_path / "known")
        steps = read_steps(RunDir(tmp_path / "auto").steps())
        assert steps["images"].tolist() == [12] * 4
        snapshot, _ = checkpoint.read_newest(RunDir(tmp_path / "auto"))
        assert snapshot is not None and snapshot.progress.accumulate == {"0": 4}

    def test_when_one_image_is_too_much_it_ends(
        self, few_images: Path, tmp_path: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(self: Learner, batch: DeviceBatch, num_places: int) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        monkeypatch.setattr(Learner, "_backward", full)
        code, _, err = fortyfold("train", "tiny", "--data", few_images, "--out", tmp_path, "--auto-accumulate")
        assert (code, err) == (
            1,
            "fortyfold: out of memory in phase 0: test_resnet with 32 images of 32 px a step, even in 32 micro-batches "
            'a rank; start anew with precision.dtype = "bf16", or a smaller px or model\n',
        )

    def test_normalisation_layers_take_no_single_image(
        self, few_images: Path, tmp_path: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = Learner._backward

        def limited(self: Learner, batch: DeviceBatch, num_places: int) -> torch.Tensor:
            if len(batch) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return whole(self, batch, num_places)

        monkeypatch.setattr(Learner, "_backward", limited)
        arguments = ("--out", tmp_path, "--set", "global_batch=4", "--auto-accumulate")
        code, _, err = fortyfold("train", "tiny", "--data", few_images, *arguments)
        assert code == 1 and "even in 2 micro-batches a rank" in err and err.count("\n") == 1

    def test_in_an_evaluation_it_is_one_line_too(
        self, few_images: Path, tmp_path: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        common = ("train", "tiny", "--data", few_images, "--out", tmp_path, "--set", "global_batch=3", "--epochs", 1)
        assert fortyfold(*common)[0] == 0

        def full(*arguments: Any, **options: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        monkeypatch.setattr("fortyfold.engine.evaluate.evaluate", full)
        for command in (("evaluate", tmp_path), (*common, "--fresh")):
            code, _, err = fortyfold(*command)
            assert code == 1 and "out of memory" in err and "3 images of 32 px at once on cpu" in err
            assert err.count("\n") == 1


def test_averages_and_mirror_images_are_in_events_table_and_terminal(
    few_images: Path, tmp_path: Path, fortyfold: Fortyfold
) -> None:
    command = ("train", "tiny", "--data", few_images, "--out", tmp_path, "--set", "ema.decay=0.5", "--epochs", 2)
    code, out, err = fortyfold(*command, "--set", "evaluate.flip=true", "--set", "evaluate.rectangular=true")
    assert (code, err) == (0, "")
    events = [event for event in read_events(RunDir(tmp_path).events()) if event["kind"] == "evaluated"]
    names = ("", "flip_", "rect_", "ema_", "ema_flip_", "ema_rect_")
    assert all(f"{name}top1" in events[-1] and f"{name}loss" in events[-1] for name in names)
    assert events[-1]["ema_loss"] != events[-1]["loss"] != events[-1]["flip_loss"]
    assert "  EMA top-1 " in out and "  EMA with mirror image top-1 " in out
    rows = list(csv.DictReader(RunDir(tmp_path).summary.read_text().splitlines()))
    assert float(rows[-1]["ema_flip_top1"]) == events[-1]["ema_flip_top1"]
    code, out, err = fortyfold("evaluate", tmp_path)
    assert (code, err) == (0, "")
    loss = f"loss {events[-1]['ema_loss']:.4f}"
    assert next(line for line in out.splitlines() if line.startswith("EMA: ")).endswith(loss)
    snapshot, _ = checkpoint.read_newest(RunDir(tmp_path))
    assert snapshot is not None
    assert snapshot.progress.best_top1 == max(event["ema_top1"] for event in events)


def test_first_weights_come_from_a_file(few_images: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    def train_on(name: str, *changes: str) -> tuple[int, str, str]:
        sets = [argument for change in changes for argument in ("--set", change)]
        return fortyfold("train", "tiny", "--data", few_images, "--epochs", 1, "--out", tmp_path / name, *sets)

    assert train_on("first")[0] == 0
    newest = RunDir(tmp_path / "first").checkpoints / checkpoint.names(RunDir(tmp_path / "first"))[0]
    weights = newest / MODEL
    code, _, err = train_on("second", f"model.pretrained={weights}", "schedule.warmup_epochs=0", "optim.lr=1e-30")
    assert (code, err) == (0, "")
    before, after = safetensors.torch.load(weights.read_bytes()), last_files(tmp_path / "second")[MODEL]
    assert torch.equal(before["conv1.0.weight"], safetensors.torch.load(after)["conv1.0.weight"])
    code, _, err = train_on("third", "model.pretrained=x.pth")
    assert code == 2 and "fortyfold weights convert x.pth x.safetensors" in err
