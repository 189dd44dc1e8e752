"""Ten thousand malformed inputs through the decoder and the index of shards, in one process.

    .venv/bin/python benchmarks/malformed.py

Four of five are images (tests/data/malformed_images.py), the rest indexes of shards (malformed_index.py beside it).
Each must become pixels, an index, or a reason; memory must not grow by more than 50 MB. Exits 1 otherwise.

glibc keeps some of what was freed, up to 64 MB a thread. Here it is told to give it back, so that growth is a leak.
"""

import argparse
import ctypes
import itertools
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "data"))
from malformed_images import malformed_images
from malformed_index import malformed_indexes, small_shards

from fortyfold.data import augment, decode
from fortyfold.data.places import Places
from fortyfold.data.reader import Reader
from fortyfold.data.requests import eval_requests
from fortyfold.data.shards import INDEX_NAME, open_shards
from fortyfold.spec.errors import UserError

MOST_GROWTH_BYTES = 50e6
CHUNK = 250
PX = 32
NUM_THREADS = 2


def in_one_file(path: Path, blobs: list[bytes]) -> Places:
    path.write_bytes(b"".join(blobs))
    lengths = np.array([len(blob) for blob in blobs])
    return Places([str(path).encode()], np.zeros(len(blobs), np.int32), np.cumsum(lengths) - lengths, lengths)


def decode_all(path: Path, blobs: list[bytes], epoch: int) -> Iterator[str]:
    """Each image's outcome: its header is read, and a crop of what it claims to be is decoded."""
    places = in_one_file(path, blobs)
    headers, unreadable = decode.read_headers(places, NUM_THREADS)
    boxes = augment.random_crops(np.arange(len(blobs)), headers[:, :2], 0, epoch, 0.08)
    out = np.zeros((len(blobs), PX, PX, 3), np.uint8)
    turns = np.arange(len(blobs), dtype=np.uint8) % 8
    interpolation = ("bilinear", "bicubic")[epoch % 2]
    failed, _ = decode.decode_crops(places, boxes, turns, out, NUM_THREADS, interpolation)
    reasons = failed | unreadable
    return (reasons.get(row, "pixels").split(":")[0] for row in range(len(blobs)))


def use_index(folder: Path) -> str:
    """Open the index, and decode all it leads to."""
    try:
        index = open_shards(folder)
    except UserError as error:
        reason = str(error).partition("damaged (")[2].partition(");")[0] or "cannot be read"
        return re.sub("(version|file|says of) .*", r"\1 …", reason, flags=re.DOTALL)
    batches = Reader(NUM_THREADS).stream(eval_requests(index, PX, 0.9, 64))
    return "opened, images bad" if sum(len(batch.bad) for batch in batches) > 1 else "opened"  # one is, by nature


def keep_nothing_freed() -> None:
    libc, trim_threshold, mmap_threshold = ctypes.CDLL(None), -1, -3  # malloc.h
    with suppress(AttributeError):  # not glibc
        libc.mallopt(trim_threshold, 1 << 20)
        libc.mallopt(mmap_threshold, 1 << 20)


def chunks(items: Iterable[tuple[str, bytes]]) -> Iterator[list[bytes]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, CHUNK)):
        yield [blob for _, blob in chunk]


def drill(folder: Path, num_images: int, num_indexes: int, seed: int) -> tuple[Counter[str], Counter[str]]:
    images: Counter[str] = Counter()
    indexes: Counter[str] = Counter()
    for epoch, blobs in enumerate(chunks(malformed_images(num_images, seed))):
        images.update(decode_all(folder / "images", blobs, epoch))
    shards = small_shards(folder)
    for _, content in malformed_indexes(shards, num_indexes, seed):
        (shards / INDEX_NAME).write_bytes(content)
        indexes[use_index(shards)] += 1
    return images, indexes


def main() -> int:
    parser = argparse.ArgumentParser(description="malformed inputs through the decoder and the index of shards")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    num_indexes = arguments.count // 5
    process = psutil.Process()
    keep_nothing_freed()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "warm").mkdir()
        drill(folder / "warm", 300, 30, 1)  # what is imported and kept once
        before, started = process.memory_info().rss, time.perf_counter()
        images, indexes = drill(folder, arguments.count - num_indexes, num_indexes, arguments.seed)
        seconds, growth = time.perf_counter() - started, process.memory_info().rss - before
    for title, outcomes in (("images", images), ("indexes", indexes)):
        print(f"{outcomes.total()} {title}")
        print("\n".join(f"  {number:6} {outcome}" for outcome, number in outcomes.most_common()))
    assert images.total() + indexes.total() == arguments.count
    good = growth <= MOST_GROWTH_BYTES
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"{decode.NAME}: no crash, {seconds:.0f} s")
    limit = f"{'within' if good else 'more than'} {MOST_GROWTH_BYTES / 1e6:.0f} MB"
    print(f"memory grew by {growth / 1e6:.1f} MB ({limit}); at its peak it was {peak:.0f} MB")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
