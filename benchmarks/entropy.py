"""Images a second of the native decoder with our own Huffman decoding over those with libjpeg's, in one run.

    .venv/bin/python benchmarks/entropy.py                          # generated 500 × 375 JPEGs
    .venv/bin/python benchmarks/entropy.py --images FOLDER

The decoder alone (no loader), random crops to 224 px, files from the page cache; plain JPEGs and the same tiled. With
libjpeg's Huffman decoding tiles are of no use, so there the plain one is the measure for both. Also prints at which
image sizes tiling pays: the rate of tiled over plain, for copies of the images resized to several shorter sides.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from fortyfold.data import augment, decode
from fortyfold.data.cores import available_cores
from fortyfold.data.demo import DemoSpec, make_demo
from fortyfold.data.places import Places, whole_files
from fortyfold.data.prepare.shrink import shrink

PX, SIDES = 224, (160, 256, 320, 352)


def tile_all(paths: list[Path], folder: Path) -> Places:
    folder.mkdir()
    tiled = []
    for number, path in enumerate(paths):
        target = folder / f"{number}.jpg"
        target.write_bytes(decode.tile(path.read_bytes()) or path.read_bytes())
        tiled.append(bytes(target))
    return whole_files(tiled)


def resize_all(paths: list[Path], folder: Path, side: int) -> list[Path]:
    folder.mkdir()
    copies = []
    for number, path in enumerate(paths):
        blob = path.read_bytes()
        (copy,) = shrink(blob, path.name, (side,), 90)
        copies.append(folder / f"{number}.jpg")
        copies[-1].write_bytes(copy or blob)
    return copies


def rate(places: Places, boxes: "np.ndarray[tuple[int, int], np.dtype[np.int64]]", threads: int) -> float:
    out = np.empty((len(places), PX, PX, 3), np.uint8)
    started = time.perf_counter()
    reasons, _ = decode.decode_crops(places, boxes, np.zeros(len(places), np.uint8), out, threads)
    assert not reasons
    return len(places) / (time.perf_counter() - started)


def compare(plain: Places, tiled: Places, threads: int, rounds: int, with_libjpeg: bool) -> list[float]:
    """Medians of the ratios: plain and tiled over libjpeg's plain, or tiled over plain."""
    native = decode._native
    assert native is not None, "the native decoder was not built"
    headers, _ = decode.read_headers(plain, threads)
    ratios = []
    for number in range(rounds):
        boxes = augment.random_crops(np.arange(len(plain)), headers[:, :2], 0, number, 0.08)
        ours = rate(plain, boxes, threads), rate(tiled, boxes, threads)
        if with_libjpeg:
            native.allow_own_entropy(False)
            theirs = rate(plain, boxes, threads)
            native.allow_own_entropy(True)
            ratios.append([ours[0] / theirs, ours[1] / theirs])
        else:
            ratios.append([ours[1] / ours[0]])
    return [statistics.median(column) for column in zip(*ratios, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if arguments.images is None:
            make_demo(place / "demo", DemoSpec(classes=10, images=240, width=500, height=375, seed=0))
        source = arguments.images or place / "demo"
        paths = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
        plain, tiled = whole_files([bytes(path) for path in paths]), tile_all(paths, place / "tiled")
        ours, ours_tiled = compare(plain, tiled, arguments.threads, arguments.rounds, with_libjpeg=True)
        print(f"own Huffman decoding over libjpeg's: {ours:.2f}; on tiled images over libjpeg's: {ours_tiled:.2f}")
        for side in SIDES:
            copies = resize_all(paths, place / str(side), side)
            again = tile_all(copies, place / f"{side}-tiled")
            small = whole_files([bytes(path) for path in copies])
            (gain,) = compare(small, again, arguments.threads, arguments.rounds, with_libjpeg=False)
            print(f"shorter side {side}: tiled over plain {gain:.2f}")
    print(f"medians of {arguments.rounds} rounds, {arguments.threads} threads, decoder {decode.NAME}")


if __name__ == "__main__":
    main()
