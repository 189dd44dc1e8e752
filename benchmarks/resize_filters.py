"""How far training crops of a resized copy are from those of the original, by filter; and what `draft` would gain.

    .venv/bin/python benchmarks/resize_filters.py                   # generated 500 × 375 JPEGs
    .venv/bin/python benchmarks/resize_filters.py --images FOLDER   # a folder of JPEGs of your own

Each image is resized to a shorter side of 160 and of 352 and encoded (quality 90, 4:2:0); the same crops, half to
all of the shorter side, are then taken from copy and original (antialiased bilinear) at 128 and at 224 pixels.
Printed: the mean difference in grey levels, the worst image's, and the seconds of decoding and resizing.
"""

import argparse
import io
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fortyfold.data.demo import DemoSpec, make_demo
from fortyfold.data.prepare.shrink import shrunk_size

FILTERS = ("LANCZOS", "BICUBIC", "HAMMING", "BILINEAR", "BOX")
SIZES = ((160, 128), (352, 224))
Crop = tuple[float, float, float]  # place across, place down, part of the shorter side


def shrink(blob: bytes, side: int, filter_name: str, draft: bool = False) -> Image.Image:
    image = Image.open(io.BytesIO(blob))
    size = shrunk_size(*image.size, side)
    if draft:
        image.draft(None, size)
    return image.convert("RGB").resize(size, Image.Resampling[filter_name])


def reopened(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90, subsampling="4:2:0")
    return Image.open(file)


def cropped(image: Image.Image, crop: Crop, px: int) -> NDArray[np.int64]:
    across, down, part = crop
    side = min(image.size) * part
    left, top = (image.width - side) * across, (image.height - side) * down
    pixels = image.resize((px, px), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    return np.asarray(pixels).astype(np.int64)


def compare(blobs: list[bytes], px: int, make: Callable[[bytes], Image.Image]) -> tuple[list[float], float]:
    """Each image's mean difference over three crops, and the seconds of `make`."""
    chances = random.Random(0)
    differences, seconds = [], 0.0
    for blob in blobs:
        original = Image.open(io.BytesIO(blob)).convert("RGB")
        started = time.perf_counter()
        copy = make(blob)
        seconds += time.perf_counter() - started
        copy = reopened(copy)
        crops = [(chances.random(), chances.random(), chances.uniform(0.5, 1)) for _ in range(3)]
        each = [np.abs(cropped(copy, crop, px) - cropped(original, crop, px)).mean() for crop in crops]
        differences.append(float(np.mean(each)))
    return differences, seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=Path)
    folder = parser.parse_args().images
    with tempfile.TemporaryDirectory() as made:
        if folder is None:
            folder = Path(made) / "demo"
            make_demo(folder, DemoSpec(classes=10, images=120, width=500, height=375, seed=0))
        all_blobs = [
            path.read_bytes() for path in sorted(folder.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg")
        ]
    for side, px in SIZES:
        blobs = [blob for blob in all_blobs if min(Image.open(io.BytesIO(blob)).size) > side]
        print(f"shorter side {side}, crops of {px}, {len(blobs)} of {len(all_blobs)} images")
        for name, draft in [*((name, False) for name in FILTERS), ("LANCZOS", True)]:
            off, seconds = compare(blobs, px, lambda blob: shrink(blob, side, name, draft))  # noqa: B023
            what = f"{name.lower()}{' after draft' if draft else ''}"
            print(f"  {what:<20} mean {np.mean(off):.2f}, worst {max(off):.2f}; {seconds:.2f} s")


if __name__ == "__main__":
    main()
