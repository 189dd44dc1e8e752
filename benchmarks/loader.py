"""Images a second of our loader over those of torchvision's ImageFolder and DataLoader, in one run.

    .venv/bin/python benchmarks/loader.py                          # generated 500 × 375 JPEGs
    .venv/bin/python benchmarks/loader.py --images FOLDER           # a folder of JPEGs of your own

Both read the same files from the page cache, crop at random (scale 0.08–1), resize to 224, flip and make
batches of 256; ours with two threads into bytes (normalised on the device), theirs with two worker processes
into normalised floats, as its users do. They alternate; the ratio is the median over the rounds.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch

from fortyfold.data import decode
from fortyfold.data.demo import DemoSpec, make_demo
from fortyfold.data.reader import Reader
from fortyfold.data.requests import Sampler, train_requests
from fortyfold.data.splits import open_folder
from fortyfold.models import timm_import
from fortyfold.spec.recipe_file import load_recipe
from fortyfold.spec.timeline import build_timeline
from fortyfold.spec.world import World

assert timm_import  # makes torchvision importable beside a CPU build of torch
from torchvision import datasets, transforms  # noqa: E402

BATCH = 256


def our_rate(folder: Path, epoch: int, threads: int, min_scale: float) -> float:
    """One epoch with another seed each time; sizes known from the first on."""
    index = open_folder(folder)
    changes = {"global_batch": BATCH, "px": 224, "epochs": 2, "min_scale": min_scale}
    timeline = build_timeline(load_recipe("tiny", changes), len(index), World())
    with closing(Reader(threads).stream(train_requests(Sampler(epoch), [index], timeline))) as batches:
        first_epoch = timeline.num_steps // 2
        for _ in range(first_epoch):
            next(batches)
        started = time.perf_counter()
        for _ in range(timeline.num_steps - first_epoch):
            next(batches)
    return len(index) / (time.perf_counter() - started)


def their_rate(folder: Path, workers: int, min_scale: float) -> float:
    """One epoch after the workers have started and given their first batches."""
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(224, scale=(min_scale, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    dataset = datasets.ImageFolder(str(folder), transform)
    loader = torch.utils.data.DataLoader(
        dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=True, multiprocessing_context="fork"
    )
    _drain(iter(loader))
    started = time.perf_counter()
    _drain(iter(loader))
    return len(dataset) / (time.perf_counter() - started)


def _drain(batches: Iterator[object]) -> None:
    for _ in batches:
        pass


def link_images(source: Path, folder: Path, count: int) -> None:
    """A class folder of links to the source's JPEGs, repeated to `count`."""
    paths = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    (folder / "images").mkdir(parents=True)
    for number in range(count):
        (folder / "images" / f"{number:06d}.jpg").symlink_to(paths[number % len(paths)].resolve())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--count", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--min-scale", type=float, default=0.08)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        source = arguments.images
        if source is None:
            source = Path(place) / "demo"
            make_demo(source, DemoSpec(classes=10, images=600, width=500, height=375, seed=0))
        folder = Path(place) / "linked"
        link_images(source, folder, arguments.count)
        ratios = []
        for number in range(arguments.rounds):
            ours = our_rate(folder, number, arguments.threads, arguments.min_scale)
            theirs = their_rate(folder, arguments.threads, arguments.min_scale)
            ratios.append(ours / theirs)
            print(
                f"round {number + 1}: ours {ours:.0f}, torchvision {theirs:.0f} img/s, ratio {ratios[-1]:.2f}",
                flush=True,
            )
    what = f"{arguments.threads} threads, min_scale {arguments.min_scale}, decoder {decode.NAME}"
    print(f"median ratio {statistics.median(ratios):.2f} ({what})")


if __name__ == "__main__":
    main()
