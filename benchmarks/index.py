"""Opens indexes of 1.28 million images (synthetic names), shards and a cached folder, and draws an epoch's order.

    .venv/bin/python benchmarks/index.py

Each is opened in a process of its own; memory is the growth of its resident set at its highest, over a process that
has only imported the package. Exits 1 if opening takes over 1 s, an order over 0.2 s, or memory over 200 MB.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fortyfold.data import folders
from fortyfold.data.index import Index
from fortyfold.data.order import permutation
from fortyfold.data.shards import ROW_DTYPE, ShardFile, write_index
from fortyfold.data.splits import open_folder

NUM_IMAGES, NUM_CLASSES, NUM_SHARDS = 1_281_167, 1000, 550
MOST_OPEN_SECONDS, MOST_ORDER_SECONDS, MOST_MEGABYTES = 1.0, 0.2, 200.0


def synthetic_names() -> tuple[tuple[str, ...], "np.ndarray[tuple[int], np.dtype[np.int32]]", bytes, list[int]]:
    classes = tuple(f"n{1_440_764 + 7 * label:08d}" for label in range(NUM_CLASSES))
    labels = np.sort(np.arange(NUM_IMAGES, dtype=np.int32) % NUM_CLASSES)
    names = [
        f"{classes[label]}/{classes[label]}_{number}.JPEG".encode() for number, label in enumerate(labels.tolist())
    ]
    return classes, labels, b"".join(names), list(map(len, names))


def write_shards(folder: Path) -> None:
    classes, labels, names, lengths = synthetic_names()
    rows = np.zeros(NUM_IMAGES, ROW_DTYPE)
    rows["shard"] = np.arange(NUM_IMAGES) % NUM_SHARDS
    rows["label"], rows["name_bytes"], rows["length"] = labels, lengths, 110_000
    rows["width"], rows["height"], rows["orientation"] = 500, 375, 1
    rows["offset"] = np.arange(NUM_IMAGES) // NUM_SHARDS * 112_000
    folder.mkdir()
    files = [ShardFile(f"train-{shard:06d}.tar", 1 << 30, "0" * 64) for shard in range(NUM_SHARDS)]
    for file in files:
        (folder / file.name).touch()
        os.truncate(folder / file.name, file.num_bytes)  # a hole
    write_index(folder, classes, files, rows, names, {})


def write_cache(folder: Path) -> None:
    classes, labels, names, lengths = synthetic_names()
    folder.mkdir()
    for name in classes:
        (folder / name).mkdir()
    mtimes = {name: os.stat(folder / name).st_mtime_ns for name in ("", *classes)}  # noqa: PTH116
    folders._write_cache(Index(folder, classes, labels, names, np.cumsum(lengths)), mtimes)


def open_once(folder: Path) -> None:
    """In a process of its own: prints seconds to open, seconds for an order (median of 5), megabytes."""
    bare = resident_megabytes("VmRSS")
    started = time.perf_counter()
    index = open_folder(folder)
    opened = time.perf_counter() - started
    assert len(index) == NUM_IMAGES
    times = []
    for epoch in range(5):
        started = time.perf_counter()
        permutation(len(index), 0, epoch)
        times.append(time.perf_counter() - started)
    print(opened, statistics.median(times), resident_megabytes("VmHWM") - bare)


def resident_megabytes(field: str) -> float:
    """VmRSS is now, VmHWM the highest so far."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024 / 1e6


def main() -> None:
    if len(sys.argv) > 1:
        open_once(Path(sys.argv[1]))
        return
    good = True
    with tempfile.TemporaryDirectory() as place:
        os.environ["FORTYFOLD_CACHE"] = f"{place}/cache"
        for name, write in (("shards", write_shards), ("folder", write_cache)):
            folder = Path(place).resolve() / name
            write(folder)
            lines = [
                subprocess.run([sys.executable, __file__, str(folder)], check=True, capture_output=True, text=True)
                for _ in range(3)
            ]
            opened, order, megabytes = np.median([list(map(float, line.stdout.split())) for line in lines], axis=0)
            print(f"{name}: opened in {opened:.2f} s, an order in {order:.3f} s, {megabytes:.0f} MB (medians of 3)")
            good &= opened < MOST_OPEN_SECONDS and order < MOST_ORDER_SECONDS and megabytes <= MOST_MEGABYTES
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
