"""Decoding with Pillow: what the native decoder does not take, and everything where that one is not built.

Whatever the bytes are, the answer is pixels or BadImage. An image counts by its content, not its name: a PNG
called .JPEG is read, grey and CMYK become RGB. Sizes over
MAX_PIXELS are refused before any memory is taken.
"""

import io
import warnings

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

from fortyfold.data.turns import MIRROR_COLUMNS, MIRROR_ROWS, TRANSPOSE

MAX_PIXELS = 64_000_000
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")  # no EPS: Pillow would start Ghostscript
FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_ORIENTATION_TAG = 0x0112
Image.init()  # now, since it is not safe in several threads at once

# What Pillow has to say about odd metadata helps nobody in a terminal; a header that claims an absurd size
# is a bad image like any other.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
warnings.filterwarnings("error", category=Image.DecompressionBombWarning)


class BadImage(Exception):
    """The bytes cannot be decoded; the message says why."""


def read_header(blob: bytes) -> tuple[int, int, int]:
    """(width, height, EXIF orientation) of the image as stored."""
    with opened(blob) as image:
        return image.width, image.height, orientation(image)


def decode_crop(
    blob: bytes, box: NDArray[np.int64], width: int, height: int, turn: int = 0, interpolation: str = "bilinear"
) -> NDArray[np.uint8]:
    """The `box` of the image, resized (antialiased) and turned (data/turns.py) to width × height: RGB, HWC."""
    with opened(blob) as image:
        return crop_image(image, box, width, height, turn, interpolation)


def crop_image(
    image: Image.Image, box: NDArray[np.int64], width: int, height: int, turn: int, interpolation: str
) -> NDArray[np.uint8]:
    """The same of an opened image."""
    transposed = turn & TRANSPOSE
    left, top, right, bottom = box.tolist()
    if not (0 <= left < right <= image.width and 0 <= top < bottom <= image.height):
        raise BadImage("the image changed its size while in use")  # Pillow would make black pixels, millions if asked
    try:
        pixels = (image if image.mode == "RGB" else image.convert("RGB")).crop((left, top, right, bottom))
        pixels = pixels.resize((height, width) if transposed else (width, height), FILTERS[interpolation])
    except Exception as error:  # Pillow's readers raise nearly anything on damaged bytes
        raise BadImage(describe(error)) from None
    turned = np.asarray(pixels)
    turned = turned.transpose(1, 0, 2) if transposed else turned
    return turned[:: -1 if turn & MIRROR_ROWS else 1, :: -1 if turn & MIRROR_COLUMNS else 1]


def orientation(image: Image.Image) -> int:
    """By its EXIF data, 1…8."""
    try:
        number = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # damaged metadata is no reason to do without the image
        return 1
    return number if number in range(1, 9) else 1


def opened(blob: bytes) -> Image.Image:
    """The image with its header read and its size found bearable; its pixels are read on demand, and may raise."""
    if not blob:
        raise BadImage("the file is empty")
    try:
        image = Image.open(io.BytesIO(blob), formats=FORMATS)
    except Exception as error:
        raise BadImage(describe(error)) from None
    if image.width * image.height > MAX_PIXELS:
        raise BadImage(f"{image.width} × {image.height} pixels are more than the limit of {MAX_PIXELS}")
    return image


def describe(error: Exception) -> str:
    """What a reader of Pillow's raised, in one line."""
    if isinstance(error, PIL.UnidentifiedImageError):
        return "not an image that Pillow knows"
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
