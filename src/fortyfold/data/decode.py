"""The one place where files become pixels: a batch at a time, by the native decoder or else by Pillow.

Whatever the files hold, each image's answer is pixels or a reason why not. The native decoder (native/) takes
JPEGs of one or three components; anything else goes to Pillow. Their pixels differ by a grey level here and
there, so a run records NAME and does not go on with another. FORTYFOLD_DECODER=pillow chooses Pillow.
"""

import importlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray

from fortyfold.data import pillow_decode
from fortyfold.data.pillow_decode import MAX_PIXELS, BadImage
from fortyfold.data.places import Places, why_unreadable
from fortyfold.data.turns import Turns
from fortyfold.spec.errors import UserError

Headers = NDArray[np.int64]  # (width, height, EXIF orientation) a row, of the image as stored
Sizes = NDArray[np.int64]  # (width, height) a row
Boxes = NDArray[np.int64]  # (left, top, right, bottom) a row
Reasons = dict[int, str]  # why a row has no pixels

_NATIVE_VERSION = 2  # raised whenever the native decoder's pixels change
_OK, _UNREADABLE, _FOREIGN, _OUT_OF_MEMORY = 0, 1, 3, 7  # statuses of native/jpeg.h
_MAX_FILE_BYTES = 1 << 30
_REASONS = {
    2: "the file is empty",
    4: f"more pixels than the limit of {MAX_PIXELS}",
    5: "the image is truncated",
    6: "the JPEG is corrupt",
    8: "the image changed its size while in use",
}


class StageSeconds(NamedTuple):
    """Where the decoder's time went, summed over its threads."""

    read: float = 0.0
    decode: float = 0.0
    resize: float = 0.0  # and changing pixels afterwards


def _load_native() -> ModuleType | None:
    wish = os.environ.get("FORTYFOLD_DECODER", "")
    if wish not in ("", "native", "pillow"):
        raise UserError(f"FORTYFOLD_DECODER={wish}: there are native and pillow")
    if wish == "pillow":
        return None
    try:
        return importlib.import_module("fortyfold.data._native")
    except ImportError:
        if wish == "native":
            raise UserError("FORTYFOLD_DECODER=native, but the native decoder was not built") from None
        return None


def _name(native: ModuleType | None) -> str:
    if native is None:
        return f"pillow {PIL.__version__}"
    return f"native {_NATIVE_VERSION} ({native.LIBJPEG}), else pillow {PIL.__version__}"


_native = _load_native()
NAME = _name(_native)
TILER = _native.LIBJPEG if _native else None  # what writes tiled JPEGs


def is_native() -> bool:
    return _native is not None


def notice() -> str | None:
    """What a user should know once: that the fast decoder is missing, unless that was asked for."""
    if is_native() or os.environ.get("FORTYFOLD_DECODER"):
        return None
    return (
        "the native JPEG decoder was not built, and Pillow is several times slower; "
        "install a C compiler and libjpeg-turbo's headers, then fortyfold again"
    )


def read_headers(places: Places, num_threads: int) -> tuple[Headers, Reasons]:
    """Width, height and orientation of each image."""
    headers = np.ones((len(places), 3), np.int64)
    statuses = np.full(len(places), _FOREIGN, np.int32)
    if _native is not None:
        _native.read_sizes(*_where(places), headers, statuses, MAX_PIXELS, num_threads)

    def by_pillow(row: int) -> None:
        headers[row] = pillow_decode.read_header(read_image(places, row))

    return headers, _settle(places, statuses, by_pillow, num_threads)


def decode_crops(
    places: Places,
    boxes: Boxes,
    turns: Turns,
    out: NDArray[np.uint8],
    num_threads: int,
    interpolation: str = "bilinear",
) -> tuple[Reasons, StageSeconds]:
    """The box of each image, resized (antialiased) to `out`'s height × width and turned as `turns` say.

    Boxes are on the images as they are stored. Places of images that have no pixels are left as they are.
    """
    count, height, width, _ = out.shape
    assert count == len(places) and out.shape[3] == 3 and out.flags.c_contiguous
    statuses = np.full(count, _FOREIGN, np.int32)
    nanoseconds = np.zeros(3, np.int64)
    if _native is not None:
        how = np.ascontiguousarray(boxes, np.int64), np.ascontiguousarray(turns, np.uint8)
        size = width, height, interpolation == "bicubic", MAX_PIXELS, num_threads
        _native.decode_crops(*_where(places), *how, out, statuses, nanoseconds, *size)

    pillow_seconds: list[tuple[float, float]] = []

    def by_pillow(row: int) -> None:
        started = time.perf_counter()
        blob = read_image(places, row)
        read = time.perf_counter()
        out[row] = pillow_decode.decode_crop(blob, boxes[row], width, height, int(turns[row]), interpolation)
        pillow_seconds.append((read - started, time.perf_counter() - read))

    reasons = _settle(places, statuses, by_pillow, num_threads)
    read, decoded, resized = (nanoseconds * 1e-9).tolist()
    for one in pillow_seconds:  # Pillow's resizing counts as decoding
        read, decoded = read + one[0], decoded + one[1]
    return reasons, StageSeconds(read, decoded, resized)


def fetch(places: Places, num_threads: int) -> None:
    """Read the images' bytes and forget them: the system then has them at hand when they are decoded."""
    if _native is not None:
        _native.fetch(*_where(places), num_threads)
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="fetch") as pool:
        for row in range(len(places)):
            pool.submit(places.read, row)  # a fault will be met again when the image is decoded


def tile(jpeg: bytes) -> bytes | None:
    """The same image, losslessly, with restart markers that let a crop be decoded alone; None where that cannot be."""
    if _native is None:
        raise UserError("tiling needs the native decoder, which was not built; use --tile never")
    tiled: bytes | None = _native.tile(jpeg, MAX_PIXELS)
    return tiled


def _where(places: Places) -> tuple[list[bytes], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    which = np.ascontiguousarray(places.which, np.int32)
    offsets, lengths = np.ascontiguousarray(places.offsets, np.int64), np.ascontiguousarray(places.lengths, np.int64)
    return places.files, which, offsets, lengths


def _settle(places: Places, statuses: NDArray[np.int32], by_pillow: Callable[[int], None], num_threads: int) -> Reasons:
    """Give what is left to Pillow, and say why the rest has no pixels."""
    if not statuses.any():
        return {}
    reasons: Reasons = {}
    for row in np.flatnonzero((statuses != _OK) & (statuses != _FOREIGN)).tolist():
        status = int(statuses[row])
        if status == _OUT_OF_MEMORY:
            raise MemoryError(f"no memory to decode {os.fsdecode(places.file(row))}")
        unreadable = status == _UNREADABLE
        reasons[row] = why_unreadable(places.one(row), _MAX_FILE_BYTES) if unreadable else _REASONS[status]
    foreign = np.flatnonzero(statuses == _FOREIGN).tolist()
    return reasons | attempt(by_pillow, foreign, num_threads)


def attempt(work: Callable[[int], None], rows: Sequence[int], num_threads: int) -> Reasons:
    """Do the work for each row, in threads; gives why it could not be done."""

    def try_one(row: int) -> str | None:
        try:
            work(row)
        except BadImage as error:
            return str(error)
        return None

    if not rows:
        return {}
    with ThreadPoolExecutor(num_threads, thread_name_prefix="pillow") as pool:
        return {row: reason for row, reason in zip(rows, pool.map(try_one, rows), strict=True) if reason is not None}


def read_image(places: Places, row: int) -> bytes:
    """The image's bytes; a fault that may pass is not a bad image, and ends the run."""
    try:
        return places.read(row)
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise BadImage(error.strerror) from None
