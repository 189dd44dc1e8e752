"""What the engine costs: its steps a second over those of a bare PyTorch loop, same model, same ready batches.

    .venv/bin/python benchmarks/step_overhead.py

The two alternate in one process every few steps, since the machine's own speed drifts; a round's ratio is that
of the times summed over its turns, and the figure is the median over the rounds. The engine's side is
the real loop, `run_steps`, with schedule, records, digests and a journal on the disk; only the loader is
replaced by batches that are ready. The bare loop does what any script does: copy, normalise, forward, loss,
backward, step.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import closing, suppress
from itertools import cycle, islice
from pathlib import Path

import torch
from torch.nn import functional

from fortyfold.data.demo import DemoSpec, make_demo
from fortyfold.data.reader import Batch
from fortyfold.data.requests import train_requests
from fortyfold.engine.device import describe
from fortyfold.engine.journal import Journal
from fortyfold.engine.learner import Learner
from fortyfold.engine.setup import Job, Training, open_job, set_up
from fortyfold.engine.stop import StopFlag
from fortyfold.engine.train import run_steps
from fortyfold.spec.recipe import Data
from fortyfold.spec.recipe_file import load_recipe
from fortyfold.spec.run_dir import RunDir

DEMO = DemoSpec(classes=4, images=240, width=48, height=48, seed=0)


TURNS = 10  # of each side in a round


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


def build(folder: Path, name: str, model: str, px: int, global_batch: int) -> tuple[Training, Job]:
    changes = {
        "data.root": str(folder / "data"), "model.name": model, "px": px, "global_batch": global_batch,
        "epochs": 100_000, "evaluate.every_epochs": 0,
        "checkpoint.every_minutes": 0, "checkpoint.every_epochs": 0,
    }  # fmt: skip
    run_dir = RunDir(folder / name)
    run_dir.path.mkdir()
    job = open_job(load_recipe("tiny", changes), run_dir)
    return set_up(job, Journal(run_dir, 1), StopFlag(), 1, None), job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="test_resnet")
    parser.add_argument("--px", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_demo(Path(folder) / "data", DEMO)
        ours, job = build(Path(folder), "ours", arguments.model, arguments.px, arguments.batch)
        bare, _ = build(Path(folder), "bare", arguments.model, arguments.px, arguments.batch)
        data = job.recipe.data
        requests = train_requests(job.sampler, [job.train_index], job.timeline)
        stream = ours.reader.stream(requests)
        with closing(stream):
            ready = list(islice(stream, 4))
        ratios = []
        for number in range(-1, arguments.rounds):
            seconds = [0.0, 0.0]
            for _ in range(TURNS):
                seconds[0] += engine_seconds(ours, ready, arguments.steps // TURNS)
                seconds[1] += bare_seconds(bare.learner, data, ready, arguments.steps // TURNS)
            if number >= 0:  # the first round warms up
                rates = [arguments.steps / taken for taken in seconds]
                ratios.append(rates[0] / rates[1])
                print(f"round {number + 1}: engine {rates[0]:.1f}, bare {rates[1]:.1f} steps/s, ratio {ratios[-1]:.3f}")
    what = f"{arguments.model} at {arguments.px} px, batch {arguments.batch}, {describe(job.device)}"
    print(f"median ratio {statistics.median(ratios):.3f} ({what})")


if __name__ == "__main__":
    main()
