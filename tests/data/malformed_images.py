"""Images that are damaged, or made to mislead; and the whole ones that they are made from.

Everything is a function of its arguments: what failed once can be made again.
"""

import re
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
from images import encoded, pixels, with_size

from fortyfold.data import decode

Generator = np.random.Generator
SAMPLINGS = (0, 1, 2)  # Pillow's numbers of 4:4:4, 4:2:2, 4:2:0
_MARKERS = (0xC0, 0xC1, 0xC2, 0xC4, 0xC9, 0xD0, 0xD7, 0xD8, 0xD9, 0xDA, 0xDB, 0xDC, 0xDD, 0xE0, 0xE1, 0xEE, 0xFE, 0xFF)


def exif(orientation: int, big_endian: bool = False, padding: int = 0) -> bytes:
    """An EXIF segment's content that holds an orientation, `padding` bytes before its directory."""
    order = ">" if big_endian else "<"
    head = (b"MM" if big_endian else b"II") + struct.pack(order + "HI", 42, 8 + padding) + bytes(padding)
    entry = struct.pack(order + "HHIHH", 0x0112, 3, 1, orientation, 0)
    return b"Exif\0\0" + head + struct.pack(order + "H", 1) + entry + bytes(4)


def whole_jpegs() -> list[bytes]:
    """Small JPEGs of every kind that is decoded: samplings, odd sizes, grey, progressive, restarts, EXIF, tiled."""
    blobs = [
        encoded(pixels(width, height), quality=85, subsampling=sampling, progressive=progressive)
        for width, height in ((16, 16), (97, 61), (33, 130))
        for sampling in SAMPLINGS
        for progressive in (False, True)
    ]
    blobs += [encoded(pixels(75, 52).convert("L"), progressive=progressive) for progressive in (False, True)]
    blobs += [encoded(pixels(90, 70), restart_marker_blocks=blocks) for blocks in (1, 3)]
    blobs += [encoded(pixels(90, 70), restart_marker_rows=1, progressive=True)]
    blobs += [encoded(pixels(40, 30), exif=exif(number, number % 2 == 0)) for number in range(9)]
    blobs += [encoded(pixels(200, 150), quality=95), encoded(pixels(1, 1)), encoded(pixels(200, 3), subsampling=2)]
    return blobs + (tiled(blobs) if decode.is_native() else [])


def tiled(blobs: list[bytes]) -> list[bytes]:
    return [result for blob in blobs if (result := decode.tile(blob)) is not None]


def foreign() -> list[bytes]:
    """What the native decoder leaves to Pillow, as far as that knows it."""
    picture = pixels(64, 48)
    formats = ("PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
    return [encoded(picture.convert("CMYK")), *(encoded(picture, name) for name in formats)]


def segments(jpeg: bytes) -> list[int]:
    """Offsets of the header's markers, from the image's start to the first scan."""
    places, at = [0], 2
    while at + 4 <= len(jpeg) and jpeg[at] == 0xFF and jpeg[places[-1] + 1] != 0xDA:
        places.append(at)
        at += 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
    return places


def markers(jpeg: bytes) -> list[int]:
    """Offsets of all markers, those between and inside the scans, too."""
    header = segments(jpeg)
    return header + [
        header[-1] + 2 + found.start() for found in re.finditer(b"\xff[\x01-\xfe]", jpeg[header[-1] + 2 :])
    ]


def _flip_bits(jpeg: bytes, rng: Generator) -> bytes:
    damaged = bytearray(jpeg)
    for place in rng.integers(2, len(jpeg), int(rng.integers(1, 20))):
        damaged[place] ^= 1 << int(rng.integers(0, 8))
    return bytes(damaged)


def _set_bytes(jpeg: bytes, rng: Generator) -> bytes:
    damaged = bytearray(jpeg)
    for place in rng.integers(2, len(jpeg), int(rng.integers(1, 6))):
        damaged[place] = rng.integers(0, 256)
    return bytes(damaged)


def _cut_anywhere(jpeg: bytes, rng: Generator) -> bytes:
    return jpeg[: rng.integers(1, len(jpeg) - 1)]


def _cut_at_marker(jpeg: bytes, rng: Generator) -> bytes:
    """Cut at a marker or shortly behind it; half of them with an end put there."""
    end = int(rng.choice(markers(jpeg))) + int(rng.integers(0, 6))
    return jpeg[:end] + (b"\xff\xd9" if rng.random() < 0.5 else b"")


def _change_length(jpeg: bytes, rng: Generator) -> bytes:
    place = int(rng.choice(segments(jpeg)[1:])) + 2
    near = int.from_bytes(jpeg[place : place + 2], "big") + int(rng.integers(-3, 4))
    length = int(rng.choice([0, 1, 2, 3, 0xFFFF, near % 65536]))
    return jpeg[:place] + length.to_bytes(2, "big") + jpeg[place + 2 :]


def _claim_size(jpeg: bytes, rng: Generator) -> bytes:
    """A header that promises far more pixels than there are, often more than the limit."""
    width, height = (int(side) for side in rng.choice([0, 1, 200, 3000, 8000, 16000, 65500, 65535], 2))
    return with_size(jpeg, width, height)


def _move_segment(jpeg: bytes, rng: Generator) -> bytes:
    """A piece left out, twice or elsewhere."""
    first, second, where = sorted(rng.choice(markers(jpeg), 3).tolist())
    without = jpeg[:first] + jpeg[second:]
    return without[:where] + jpeg[first:second] * int(rng.integers(0, 3)) + without[where:]


def _join(jpeg: bytes, rng: Generator) -> bytes:
    """Polyglots, and one image inside or behind another."""
    zipped = b"PK\x03\x04" + bytes(26) + jpeg[:100] + b"PK\x05\x06" + bytes(18)
    segment = b"\xff\xfe" + min(len(jpeg) + 2, 65535).to_bytes(2, "big") + jpeg[:65533]
    kinds = [jpeg + zipped, zipped + jpeg, b"GIF89a" + jpeg, jpeg + jpeg, b"%PDF-1.4\n" + jpeg,
             jpeg[:2] + segment + jpeg[2:], jpeg[:2] + b"\xff" * 9 + jpeg[2:], b"<html>" + jpeg]  # fmt: skip
    return kinds[int(rng.integers(0, len(kinds)))]


def _marker_soup(jpeg: bytes, rng: Generator) -> bytes:
    soup = b"".join(
        bytes([0xFF, int(rng.choice(_MARKERS))]) + rng.bytes(int(rng.integers(0, 12)))
        for _ in range(int(rng.integers(1, 60)))
    )
    place = int(rng.choice(markers(jpeg)[1:]))
    return jpeg[:place] + soup + jpeg[place:]


def _odd_exif(jpeg: bytes, rng: Generator) -> bytes:
    """EXIF that is cut, huge, or leads beyond its end."""
    whole = exif(int(rng.integers(0, 10)), rng.random() < 0.5, int(rng.choice([0, 1, 100, 60_000])))
    content = _set_bytes(whole, rng)[: int(rng.integers(0, len(whole) + 1))]
    count = int(rng.choice([1, 1, 1, 40]))
    return jpeg[:2] + (b"\xff\xe1" + (len(content) + 2).to_bytes(2, "big") + content) * count + jpeg[2:]


def with_scans(jpeg: bytes, number: int) -> bytes:
    """The image's shortest scan so many times more."""
    places = [*markers(jpeg), len(jpeg) - 2]
    scans = [jpeg[start:end] for start, end in pairwise(places) if jpeg[start + 1] == 0xDA]
    return jpeg[:-2] + min(scans, key=len)[:200] * number + jpeg[-2:]


def _many_scans(jpeg: bytes, rng: Generator) -> bytes:
    return with_scans(jpeg, int(rng.choice([2, 50, 300])))


def _noise(jpeg: bytes, rng: Generator) -> bytes:
    kinds = [b"", b"\0", b"\xff", b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8\xff\xd9", rng.bytes(2000),
             b"\xff\xd8\xff" + rng.bytes(500) + b"\xff\xd9", b"\xff" * 3000]  # fmt: skip
    return kinds[int(rng.integers(0, len(kinds)))]


MUTATIONS: dict[str, Callable[[bytes, Generator], bytes]] = {
    "bits flipped": _flip_bits,
    "bytes changed": _set_bytes,
    "cut anywhere": _cut_anywhere,
    "cut at a marker": _cut_at_marker,
    "lengths changed": _change_length,
    "sizes claimed": _claim_size,
    "segments moved": _move_segment,
    "polyglots": _join,
    "marker soup": _marker_soup,
    "odd EXIF": _odd_exif,
    "many scans": _many_scans,
    "noise": _noise,
}


def malformed_images(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """(kind, file), each kind in turn, made from every kind of JPEG in turn; now and then another format, damaged."""
    rng = np.random.default_rng(seed)
    sources, others = whole_jpegs(), foreign()
    kinds = list(MUTATIONS.items())
    for number in range(count):
        kind, mutate = kinds[number % len(kinds)]
        if number % 17 == 0:
            other = others[number // 17 % len(others)]
            yield "other formats", _cut_anywhere(_flip_bits(other, rng), rng) if rng.random() < 0.5 else other
        else:
            yield kind, mutate(sources[int(rng.integers(0, len(sources)))], rng)
