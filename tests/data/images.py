"""Makes images of every kind for the tests, good and bad."""

import io
import re

import numpy as np
from PIL import Image


def pixels(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth picture with some detail."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, format: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def with_size(jpeg: bytes, width: int, height: int) -> bytes:
    """The JPEG with another size written in its header."""
    frame = re.search(b"\xff[\xc0-\xc2]", jpeg)
    assert frame is not None
    start = frame.start() + 5
    return jpeg[:start] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + jpeg[start + 4 :]


def malformed(count: int) -> list[bytes]:
    """Truncated anywhere, flipped bytes, wrong formats, empty, huge header sizes: each kind in turn."""
    rng = np.random.default_rng(0)
    whole = encoded(pixels(64, 48), quality=90)
    files = []
    for number in range(count):
        kind = number % 6
        if kind == 0:
            files.append(whole[: rng.integers(1, len(whole) - 2)])
        elif kind == 1:
            damaged = bytearray(whole)
            for place in rng.integers(0, len(whole), 20):
                damaged[place] ^= rng.integers(1, 256)
            files.append(bytes(damaged))
        elif kind == 2:
            files.append(rng.bytes(int(rng.integers(1, 3000))))
        elif kind == 3:
            files.append(b"")
        elif kind == 4:
            files.append(with_size(whole, int(rng.integers(8_000, 65_500)), int(rng.integers(8_000, 65_500))))
        else:
            png = encoded(pixels(64, 48), "PNG")
            files.append([png[: len(png) // 2], b"%PDF-1.4\n", b"GIF89a" + whole, b"\xff\xd8\xff\xd9"][number // 6 % 4])
    return files
