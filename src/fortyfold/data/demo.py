"""The embedded data set: procedural JPEGs in the ImageFolder layout, the same bytes for the same arguments.

A class is a shape, a fill and a background (5 × 8 × 25 kinds); place, size, turn, colours and noise are
random, so that single pixels tell little (a linear classifier fails) and a small convolutional net learns
it in minutes. Every image is made from its own seed: processes may share the work in any way.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fortyfold.data.cores import available_cores
from fortyfold.data.prepare.target import making, was_made_by
from fortyfold.spec.errors import UserError
from fortyfold.spec.recipe import Data

Plane = NDArray[np.floating[Any]]

SHAPES = ("disk", "triangle", "square", "cross", "star")
FILLS = ("solid", "ring", "striped", "checked", "dotted", "double", "half", "faded")
BACKGROUNDS = ("plain", "waves", "rings", "grid", "diagonal")
GRAINS = (
    (4, 0.4),
    (8, 0.27),
    (12, 0.19),
    (16, 0.13),
    (24, 0.09),
)  # clouds a side; wavelength in shorter sides
MAX_CLASSES = len(SHAPES) * len(FILLS) * len(BACKGROUNDS) * len(GRAINS)
VAL_SHARE = 6  # one image in six
QUALITY = 90
_NOISE = 26.0  # grey levels; gives ImageNet's about 110 KB at 500 × 375
DEMO = "data demo"
_POOL_FROM = 500  # fewer images are made faster than processes are started


@dataclass(frozen=True)
class DemoSpec:
    """The arguments that fix every byte."""

    classes: int
    images: int
    width: int
    height: int
    seed: int

    def splits(self) -> dict[str, int]:
        """How many images each split has."""
        return {"train": self.images - self.images // VAL_SHARE, "val": self.images // VAL_SHARE}


def wanted_demo(data: Data) -> DemoSpec | None:
    """What a recipe wants made in data.root; None when it wants nothing, or something else is there."""
    root, demo = Path(data.root), data.demo
    if demo is None or (root.exists() and not was_made_by(root, DEMO)):
        return None
    return DemoSpec(demo.classes, demo.images, demo.px, demo.px, demo.seed)


def make_demo(
    root: Path, spec: DemoSpec, num_workers: int = 0, progress: Callable[[int, int], None] | None = None
) -> bool:
    """Make the data set in `root`; False if it is there already. A half-made one is made again."""
    _check_numbers(spec)
    with making(root, DEMO, asdict(spec)) as needed:
        if not needed:
            return False
        for label, split in product(range(spec.classes), spec.splits()):
            (root / split / class_name(label)).mkdir(parents=True, exist_ok=True)
        _make_images(root, spec, num_workers or available_cores(), progress or (lambda done, total: None))
    return True


def class_name(label: int) -> str:
    shape, fill, background, grain = _traits(label)
    return f"{label:03d}-{fill}-{shape}-on-{background}{grain or ''}"


def render(spec: DemoSpec, label: int, split: str, number: int) -> Image.Image:
    """One image; a pure function of its arguments."""
    rng = np.random.Generator(np.random.Philox(key=[spec.seed % 2**64, number * 2 + (split == "val")]))
    shape, fill, background, grain = _traits(label)
    short = min(spec.width, spec.height)
    y, x = np.mgrid[0 : spec.height, 0 : spec.width].astype(np.float32) / np.float32(short)
    canvas = _backdrop(rng, spec, background, grain, x, y)
    mask = _object(rng, spec, shape, fill, x, y, short)[..., None]
    here = (canvas * mask).sum(axis=(0, 1)) / max(float(mask.sum()), 1.0)
    canvas += mask * (_contrasting(rng, here) - canvas)
    canvas += _NOISE * rng.standard_normal(canvas.shape, np.float32)
    return Image.fromarray(canvas.clip(0, 255).astype(np.uint8))


def _traits(label: int) -> tuple[str, str, str, int]:
    rest, shape = divmod(label, len(SHAPES))
    rest, fill = divmod(rest, len(FILLS))
    grain, background = divmod(rest, len(BACKGROUNDS))
    return SHAPES[shape], FILLS[fill], BACKGROUNDS[background], grain


def _backdrop(rng: np.random.Generator, spec: DemoSpec, kind: str, grain: int, x: Plane, y: Plane) -> Plane:
    """Soft clouds of colour, with the class's pattern over them."""
    num_clouds, wavelength = GRAINS[grain]
    clouds = Image.fromarray(rng.integers(30, 226, (num_clouds, num_clouds, 3), np.uint8))
    canvas = np.asarray(clouds.resize((spec.width, spec.height), Image.Resampling.BICUBIC)).astype(np.float32)
    phase = rng.uniform(0, 2 * np.pi, 2).astype(np.float32)
    turn = 2 * np.pi / wavelength
    patterns: dict[str, Callable[[], Plane]] = {
        "plain": lambda: np.zeros_like(x),
        "waves": lambda: np.sin(turn * y + phase[0]),
        "rings": lambda: np.sin(turn * np.hypot(x - 0.5, y - 0.5) + phase[0]),
        "grid": lambda: np.sin(turn * x + phase[0]) * np.sin(turn * y + phase[1]),
        "diagonal": lambda: np.sin(turn * (x + y) * np.float32(0.7) + phase[0]),
    }
    return canvas + 40 * patterns[kind]()[..., None]


def _object(rng: np.random.Generator, spec: DemoSpec, shape: str, fill: str, x: Plane, y: Plane, short: int) -> Plane:
    """How much of each pixel the object covers, 0 to 1."""
    radius = rng.uniform(0.2, 0.32)
    centre_x = rng.uniform(0.38, spec.width / short - 0.38)
    centre_y = rng.uniform(0.38, spec.height / short - 0.38)
    angle = rng.uniform(0, 2 * np.pi)
    dx, dy = (x - np.float32(centre_x)) / radius, (y - np.float32(centre_y)) / radius
    u = (dx * np.cos(angle) + dy * np.sin(angle)).astype(np.float32)
    v = (dy * np.cos(angle) - dx * np.sin(angle)).astype(np.float32)
    edge = _outline(shape, u, v)
    if fill == "ring":
        edge = np.abs(edge + 0.1) - 0.1
    if fill == "double":
        edge = np.minimum(np.abs(edge + 0.05) - 0.05, edge + 0.2)
    return np.clip(0.5 - edge * radius * short, 0, 1) * _paint(fill, u, v)


def _outline(shape: str, u: Plane, v: Plane) -> Plane:
    """Signed distance-like height: negative inside, 0 on the outline; 1 is the shape's radius."""
    if shape == "disk":
        return np.hypot(u, v) - 0.85
    if shape == "square":
        return np.maximum(np.abs(u), np.abs(v)) - 0.75
    if shape == "cross":
        return np.maximum(np.maximum(np.abs(u), np.abs(v)) - 1, np.minimum(np.abs(u), np.abs(v)) - 0.3)
    if shape == "triangle":
        return np.maximum(np.abs(u) * 0.866 + v * 0.5, -v) - 0.5
    fifth = 2 * np.pi / 5
    angle = np.abs(np.mod(np.arctan2(v, u), fifth) - fifth / 2)  # 0 between two tips
    return np.hypot(u, v) * (1.9 - 1.15 * angle / (fifth / 2)) - 0.8


def _paint(fill: str, u: Plane, v: Plane) -> Plane:
    """The pattern inside the outline, 0 to 1."""
    if fill == "striped":
        return (np.sin(12 * u) > 0).astype(np.float32)
    if fill == "checked":
        return (np.sin(9 * u) * np.sin(9 * v) > 0).astype(np.float32)
    if fill == "dotted":
        return (np.sin(11 * u) * np.sin(11 * v) > 0.35).astype(np.float32)
    if fill == "half":
        return (v > 0).astype(np.float32)
    if fill == "faded":
        return np.clip(0.5 + 0.5 * v, 0.1, 1)
    return np.ones_like(u)


def _contrasting(rng: np.random.Generator, behind: Plane) -> Plane:
    """A random colour that can be told from the one behind it."""
    colours = rng.uniform(10, 245, (8, 3)).astype(np.float32)
    return colours[np.argmax(np.abs(colours - behind).sum(axis=1) > 150)]


def _make_images(root: Path, spec: DemoSpec, num_workers: int, progress: Callable[[int, int], None]) -> None:
    jobs = [(split, start) for split, count in spec.splits().items() for start in range(0, count, 50)]
    done = 0
    for made in _run(root, spec, jobs, num_workers):
        done += made
        progress(done, spec.images)


def _run(root: Path, spec: DemoSpec, jobs: list[tuple[str, int]], num_workers: int) -> Iterator[int]:
    if spec.images < _POOL_FROM or num_workers == 1:
        for split, start in jobs:
            yield _make_block(root, spec, split, start)
        return
    # spawn: the caller may have threads, and a forked copy of them may hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_leave_interrupts_to_the_parent)
    try:
        splits, starts = zip(*jobs, strict=True)
        yield from pool.map(_make_block, [root] * len(jobs), [spec] * len(jobs), splits, starts)
    finally:
        pool.shutdown(cancel_futures=True)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _make_block(root: Path, spec: DemoSpec, split: str, start: int) -> int:
    stop = min(start + 50, spec.splits()[split])
    for number in range(start, stop):
        label = number % spec.classes
        path = root / split / class_name(label) / f"{split}-{number:07d}.jpg"
        beside = path.with_suffix(".part")  # a reader, or a kill, never sees half an image
        render(spec, label, split, number).save(beside, "JPEG", quality=QUALITY)
        beside.replace(path)
    return stop - start


def _check_numbers(spec: DemoSpec) -> None:
    if not 2 <= spec.classes <= MAX_CLASSES:
        raise UserError(f"--classes {spec.classes}: there are 2 to {MAX_CLASSES} kinds of demo images")
    if spec.images // VAL_SHARE < spec.classes:
        raise UserError(f"--images {spec.images}: {spec.classes} classes need at least {spec.classes * VAL_SHARE}")
