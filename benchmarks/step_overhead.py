"""What the engine costs: its steps a second over those of a bare PyTorch loop, same model, same ready batches.

    .venv/bin/python benchmarks/step_overhead.py
    .venv/bin/python benchmarks/step_overhead.py --options    # and what each of a recipe's options costs

The two alternate in one process every few steps, since the machine's own speed drifts; a round's ratio is that
of the times summed over its turns, and the figure is the median over the rounds. The engine's side is
the real loop, `run_steps`, with schedule, records, digests and a journal on the disk; only the loader is
replaced by batches that are ready. The bare loop does what any script does: copy, normalise, forward, loss,
backward, step.

An option's cost is the time of its steps over that of the engine's with everything off, in the same manner; for
those that work in the loader, the time of its batches.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from fortyfold.data.demo import DemoSpec, make_demo
from fortyfold.data.reader import Batch
from fortyfold.data.requests import train_requests
from fortyfold.engine.device import describe
from fortyfold.engine.journal import Journal
from fortyfold.engine.learner import Learner
from fortyfold.engine.setup import Job, Training, open_job, set_up
from fortyfold.engine.train import run_steps
from fortyfold.spec.recipe import Data
from fortyfold.spec.recipe_file import load_recipe
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag

DEMO = DemoSpec(classes=4, images=240, width=48, height=48, seed=0)
TURNS = 10  # of each side in a round

STEP_OPTIONS: dict[str, dict[str, Any]] = {
    "channels_last off": {"model.channels_last": False},
    "bf16": {"precision.dtype": "bf16"},
    "fp16": {"precision.dtype": "fp16"},
    "compile": {"precision.compile": True},
    "accumulate 4": {"accumulate": 4},
    "clip_norm": {"optim.clip_norm": 1.0},
    "clip_value": {"optim.clip_value": 1.0},
    "ema": {"ema.decay": 0.999},
    "bce": {"loss.name": "bce"},
    "label_smoothing": {"loss.label_smoothing": 0.1},
    "mixup": {"augment.mixup": 0.8},
    "cutmix": {"augment.cutmix": 1.0},
    "adamw": {"optim.name": "adamw"},
    "accumadamw": {"optim.name": "accumadamw"},
    "lamb": {"optim.name": "lamb"},
}
LOADER_OPTIONS: dict[str, dict[str, Any]] = {
    "color_jitter": {"augment.color_jitter": 0.4},
    "RandAugment": {"augment.policy": "rand"},
    "TrivialAugment": {"augment.policy": "trivial"},
    "erase": {"augment.erase": 0.25},
    "mixup of each image": {"augment.mixup": 0.8, "augment.mix_each": "image"},
    "repeats 3": {"augment.repeats": 3},
}


def engine_seconds(t: Training, batches: list[Batch], num_steps: int) -> float:
    """The real loop, which ends when the batches do."""
    started = time.perf_counter()
    with suppress(StopIteration):
        run_steps(t, islice(cycle(batches), num_steps))
    t.journal.flush()
    return time.perf_counter() - started


def bare_seconds(learner: Learner, data: Data, batches: list[Batch], num_steps: int) -> float:
    """A loop without anything around it, on the learner's model and optimiser."""
    model, optimizer = learner.model, learner.optimizer
    device = next(model.parameters()).device
    mean = torch.tensor(data.mean, device=device).view(1, 3, 1, 1) * 255
    std = torch.tensor(data.std, device=device).view(1, 3, 1, 1) * 255
    total = torch.zeros((), device=device)
    started = time.perf_counter()
    for batch in islice(cycle(batches), num_steps):
        images = torch.from_numpy(batch.images_nhwc).to(device, non_blocking=True).permute(0, 3, 1, 2).float()
        labels = torch.from_numpy(batch.labels).to(device, non_blocking=True)
        loss = functional.cross_entropy(model((images - mean) / std), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    total.item()
    return time.perf_counter() - started


def build(folder: Path, name: str, shape: argparse.Namespace, **options: Any) -> tuple[Training, Job]:
    changes = {
        "data.root": str(folder / "data"), "model.name": shape.model, "px": shape.px, "global_batch": shape.batch,
        "epochs": 100_000, "evaluate.every_epochs": 0,
        "checkpoint.every_minutes": 0, "checkpoint.every_epochs": 0, **options,
    }  # fmt: skip
    run_dir = RunDir(folder / name)
    run_dir.path.mkdir()
    job = open_job(load_recipe("tiny", changes), run_dir)
    return set_up(job, Journal(run_dir, 1), StopFlag(), 1, None), job


def ready_batches(training: Training, job: Job, num_batches: int = 4) -> list[Batch]:
    with closing(training.reader.stream(train_requests(job.sampler, [job.train_index], job.timeline))) as stream:
        return list(islice(stream, num_batches))


def loader_seconds(training: Training, job: Job, num_batches: int) -> float:
    started = time.perf_counter()
    ready_batches(training, job, num_batches)
    return time.perf_counter() - started


def median_ratio(rounds: int, one: Callable[[], float], other: Callable[[], float], say: str = "") -> float:
    """Of the seconds of `one` over those of `other`, which take turns."""
    ratios = []
    for number in range(-1, rounds):
        seconds = [0.0, 0.0]
        for _ in range(TURNS):
            seconds[0] += one()
            seconds[1] += other()
        if number >= 0:  # the first round warms up
            ratios.append(seconds[0] / seconds[1])
            if say:
                print(f"round {number + 1}: {say} {ratios[-1]:.3f}")
    return statistics.median(ratios)


def measure_options(folder: Path, arguments: argparse.Namespace, off: Training, job: Job) -> None:
    steps = max(2, arguments.steps // TURNS // 3)
    batches = ready_batches(off, job)
    print("\n| option | seconds a step, of those with everything off |\n| --- | --- |")
    for name, changes in STEP_OPTIONS.items():
        other, other_job = build(folder, name.replace(" ", "-"), arguments, **changes)
        own = ready_batches(other, other_job)
        ratio = median_ratio(
            3, partial(engine_seconds, other, own, steps), partial(engine_seconds, off, batches, steps)
        )
        print(f"| {name} | {ratio:.2f} |", flush=True)
    print("\n| option | the loader's seconds a batch, of those with everything off |\n| --- | --- |")
    for name, changes in LOADER_OPTIONS.items():
        other, other_job = build(folder, name.replace(" ", "-"), arguments, **changes)
        ratio = median_ratio(3, partial(loader_seconds, other, other_job, 4), partial(loader_seconds, off, job, 4))
        print(f"| {name} | {ratio:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="test_resnet")
    parser.add_argument("--px", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--options", action="store_true", help="also what each option costs")
    arguments = parser.parse_args()
    steps = arguments.steps // TURNS
    with tempfile.TemporaryDirectory() as folder:
        make_demo(Path(folder) / "data", DEMO)
        ours, job = build(Path(folder), "ours", arguments)
        bare, _ = build(Path(folder), "bare", arguments)
        ready = ready_batches(ours, job)
        ratio = median_ratio(
            arguments.rounds,
            partial(bare_seconds, bare.learner, job.recipe.data, ready, steps),
            partial(engine_seconds, ours, ready, steps),
            "engine's steps/s over the bare loop's",
        )
        what = f"{arguments.model} at {arguments.px} px, batch {arguments.batch}, {describe(job.device)}"
        print(f"median ratio {ratio:.3f} ({what})")
        if arguments.options:
            measure_options(Path(folder), arguments, ours, job)


if __name__ == "__main__":
    main()
