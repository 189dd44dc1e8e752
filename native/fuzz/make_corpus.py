"""Writes the fuzzer's seeds: small images of every kind, whole and damaged, each with parameters for every operation.

PYTHONPATH=src python native/fuzz/make_corpus.py FOLDER
"""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "data"))
from images import encoded, pixels
from malformed_images import exif, foreign, malformed_images, whole_jpegs, with_scans

NUM_OPERATIONS = 5  # of fuzz_jpeg.c
NUM_PARAMETER_BYTES = 24
EXIF_OPERATION = 1
MOST_BYTES = 20_000  # small seeds are mutated faster
NUM_DAMAGED = 600


def parameters(operation: int, rng: np.random.Generator) -> bytes:
    """The operation, a box inside the image, any output and turn."""
    return bytes([operation, 0]) + rng.bytes(NUM_PARAMETER_BYTES - 2)


def seeds() -> Iterator[bytes]:
    rng = np.random.default_rng(0)
    for number, blob in enumerate([*whole_jpegs(), *foreign()]):
        yield from (parameters(operation, rng) + blob for operation in range(NUM_OPERATIONS))
        yield bytes([3, 1 + number % 2]) + rng.bytes(NUM_PARAMETER_BYTES - 2) + blob  # a box outside
    crowded = with_scans(encoded(pixels(16, 16), progressive=True), 250)
    yield from (parameters(operation, rng) + crowded for operation in range(NUM_OPERATIONS))
    for number, (_, blob) in enumerate(malformed_images(NUM_DAMAGED)):
        yield parameters(number % NUM_OPERATIONS, rng) + blob
    for orientation in range(10):
        for big_endian in (False, True):
            yield parameters(EXIF_OPERATION, rng) + exif(orientation, big_endian)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    for blob in seeds():
        if len(blob) <= MOST_BYTES:
            (folder / hashlib.sha256(blob).hexdigest()[:16]).write_bytes(blob)
            written += 1
    print(f"{written} seeds in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
