"""Decoding with Pillow: what the native decoder does not take, and everything where that one is not built.

Whatever the bytes are, the answer is pixels or BadImage. An image counts by its content, not its name: a PNG
called .JPEG is read, grey and CMYK become RGB. EXIF orientation is not applied, as in torchvision. Sizes over
MAX_PIXELS are refused before any memory is taken.
"""

import io
import warnings

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

MAX_PIXELS = 64_000_000
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")  # no EPS: Pillow would start Ghostscript
Image.init()  # now, since it is not safe in several threads at once

# What Pillow has to say about odd metadata helps nobody in a terminal; a header that claims an absurd size
# is a bad image like any other.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
warnings.filterwarnings("error", category=Image.DecompressionBombWarning)


class BadImage(Exception):
    """The bytes cannot be decoded; the message says why."""


def read_size(blob: bytes) -> tuple[int, int]:
    """(width, height) from the header."""
    with opened(blob) as image:
        return image.size


def decode_crop(blob: bytes, box: NDArray[np.int64], px: int, flip: bool) -> NDArray[np.uint8]:
    """The `box` of the image, resized to px × px (antialiased bilinear) and mirrored if `flip`: RGB, HWC."""
    with opened(blob) as image:
        try:
            left, top, right, bottom = box.tolist()
            pixels = image.convert("RGB").crop((left, top, right, bottom))
            pixels = pixels.resize((px, px), Image.Resampling.BILINEAR)
        except Exception as error:  # Pillow's readers raise nearly anything on damaged bytes
            raise BadImage(describe(error)) from None
    if flip:
        pixels = pixels.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(pixels)


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
