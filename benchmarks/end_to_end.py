"""A whole training: `fortyfold train` against timm's own pieces in a plain loop, on the same images.

    .venv/bin/python benchmarks/end_to_end.py                  # images of 500 × 375 pixels: the loader counts
    .venv/bin/python benchmarks/end_to_end.py --width 96 --height 96

Both train the same model from scratch for the same epochs with the same batch, optimiser, learning rates, smoothing,
crops, flips and evaluations, each as a command of its own, taking turns. timm's side is its create_loader (two
workers, since the machine has two cores), create_model, create_optimizer_v2 and cosine schedule, in channels_last
memory order as ours. A command's time is all of it: start, training, evaluation after each epoch, the last checkpoint.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fortyfold.data.demo import DemoSpec, make_demo

MODEL = "resnet10t"
ARGUMENTS = {"channels": [32, 64, 128, 256], "stem_width": 16}
PX, BATCH, LR, DECAY, SMOOTHING, WARMUP, MIN_SCALE, SEED = 64, 64, 0.2, 5e-4, 0.1, 1, 0.5, 0


def train_by_timm(data: Path, out: Path, epochs: int, workers: int) -> None:
    """What a user of timm would write."""
    import torch

    from fortyfold.models.timm_import import timm

    torch.manual_seed(SEED)
    loaders = {}
    for split, training in (("train", True), ("val", False)):
        loaders[split] = timm.data.create_loader(
            timm.data.create_dataset("", root=str(data / split)), (3, PX, PX), BATCH, is_training=training,
            num_workers=workers, use_prefetcher=False, scale=(MIN_SCALE, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5,
            color_jitter=None, interpolation="bilinear", crop_pct=0.875, pin_memory=False, device=torch.device("cpu"),
        )  # fmt: skip
    model = timm.create_model(MODEL, num_classes=10, **ARGUMENTS).to(memory_format=torch.channels_last)
    optimizer = timm.optim.create_optimizer_v2(model, opt="nesterov", lr=LR, weight_decay=DECAY, momentum=0.9)
    steps = len(loaders["train"])
    schedule = timm.scheduler.CosineLRScheduler(
        optimizer, t_initial=epochs * steps, warmup_t=WARMUP * steps, warmup_lr_init=0.01 * LR, t_in_epochs=False
    )
    criterion = timm.loss.LabelSmoothingCrossEntropy(SMOOTHING)
    top1 = 0.0
    for epoch in range(epochs):
        model.train()
        for step, (images, labels) in enumerate(loaders["train"]):
            schedule.step_update(epoch * steps + step)
            loss = criterion(model(images.to(memory_format=torch.channels_last)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        top1 = _score(model, loaders["val"])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out / "last.pth")
    (out / "result.json").write_text(json.dumps({"top1": top1}))


def _score(model: Any, loader: Any) -> float:
    import torch

    model.eval()
    right = total = 0
    with torch.inference_mode():
        for images, labels in loader:
            right += int((model(images.to(memory_format=torch.channels_last)).argmax(1) == labels).sum())
            total += len(labels)
    return 100 * right / total


def fortyfold_command(data: Path, out: Path, epochs: int) -> list[str]:
    keys = {
        "data.root": f'"{data}"', "px": PX, "global_batch": BATCH, "min_scale": MIN_SCALE, "seed": SEED, "optim.lr": LR,
        "optim.weight_decay": DECAY, "loss.label_smoothing": SMOOTHING, "schedule.warmup_epochs": WARMUP,
    }  # fmt: skip
    sets = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    return [
        sys.executable, "-m", "fortyfold", "train", "smoke", "--epochs", str(epochs), "--out", str(out), *sets,
    ]  # fmt: skip


def timm_command(data: Path, out: Path, epochs: int, workers: int) -> list[str]:
    return [
        sys.executable, __file__, "--timm", str(data), str(out), "--epochs", str(epochs), "--workers", str(workers),
    ]  # fmt: skip


def timed(command: list[str]) -> float:
    environment = {**os.environ, "GOMP_SPINCOUNT": "1000"}  # as fortyfold sets it for itself; it helps timm as well
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - started


def top1_of(side: str, out: Path) -> float:
    if side == "timm":
        return float(json.loads((out / "result.json").read_text())["top1"])
    from fortyfold.metrics.overview import overview
    from fortyfold.spec.run_dir import RunDir

    top1 = overview(RunDir(out)).top1
    assert top1 is not None
    return top1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=500)
    parser.add_argument("--height", type=int, default=375)
    parser.add_argument("--images", type=int, default=3000, help="one in six is for validation")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="timm's loader processes")
    parser.add_argument("--timm", type=Path, nargs=2, metavar=("DATA", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.timm:
        return train_by_timm(arguments.timm[0], arguments.timm[1], arguments.epochs, arguments.workers)
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        make_demo(data, DemoSpec(10, arguments.images, arguments.width, arguments.height, SEED))
        for number in range(arguments.rounds):
            seconds, scores = {}, {}
            for side in ("timm", "fortyfold"):
                out = Path(folder) / f"{side}-{number}"
                out.mkdir()
                command = (
                    timm_command(data, out, arguments.epochs, arguments.workers)
                    if side == "timm"
                    else fortyfold_command(data, out, arguments.epochs)
                )
                seconds[side], scores[side] = timed(command), top1_of(side, out)
            ratios.append(seconds["timm"] / seconds["fortyfold"])
            sides = ", ".join(f"{side} {seconds[side]:.1f} s, top-1 {scores[side]:.1f} %" for side in seconds)
            print(f"round {number + 1}: {sides}; ratio {ratios[-1]:.2f}", flush=True)
    what = f"{arguments.images} images of {arguments.width} × {arguments.height}, {arguments.epochs} epochs of {MODEL}"
    print(f"median ratio {statistics.median(ratios):.2f} ({what} at {PX} px, batch {BATCH})")
    return None


if __name__ == "__main__":
    main()
