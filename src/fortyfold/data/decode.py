"""The one place where files become pixels: a batch at a time, by the native decoder or else by Pillow.

Whatever the files hold, each image's answer is pixels or a reason why not. The native decoder (native/) takes
JPEGs of one or three components; anything else goes to Pillow. Their pixels differ by a grey level here and
there, so a run records NAME and does not go on with another. FORTYFOLD_DECODER=pillow chooses Pillow.
"""

import importlib
import os
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import PIL
from numpy.typing import NDArray

from fortyfold.data import pillow_decode
from fortyfold.data.pillow_decode import MAX_PIXELS, BadImage
from fortyfold.spec.errors import UserError

Sizes = NDArray[np.int64]  # (width, height) a row
Boxes = NDArray[np.int64]  # (left, top, right, bottom) a row
Reasons = dict[int, str]  # why a row has no pixels

_NATIVE_VERSION = 1  # raised whenever the native decoder's pixels change
_OK, _UNREADABLE, _FOREIGN, _OUT_OF_MEMORY = 0, 1, 3, 7  # statuses of native/jpeg.h
_MAX_FILE_BYTES = 1 << 30
_REASONS = {
    2: "the file is empty",
    4: f"more pixels than the limit of {MAX_PIXELS}",
    5: "the image is truncated",
    6: "the JPEG is corrupt",
    8: "the image changed its size while in use",
}


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
    number = native.LIBJPEG_TURBO_VERSION  # 2001005 is 2.1.5
    turbo = f"{number // 10**6}.{number // 1000 % 1000}.{number % 1000}"
    return f"native {_NATIVE_VERSION} (libjpeg-turbo {turbo}), else pillow {PIL.__version__}"


_native = _load_native()
NAME = _name(_native)


def read_sizes(paths: list[bytes], num_threads: int) -> tuple[Sizes, Reasons]:
    """Width and height of each image, from its header."""
    sizes = np.ones((len(paths), 2), np.int64)
    statuses = np.full(len(paths), _FOREIGN, np.int32)
    if _native is not None:
        _native.read_sizes(paths, sizes, statuses, MAX_PIXELS, num_threads)

    def by_pillow(row: int) -> None:
        sizes[row] = pillow_decode.read_size(_read(paths[row]))

    return sizes, _settle(paths, statuses, by_pillow, num_threads)


def decode_crops(
    paths: list[bytes], boxes: Boxes, flips: NDArray[np.bool_], out: NDArray[np.uint8], num_threads: int
) -> Reasons:
    """The box of each image, resized to `out`'s px × px (antialiased bilinear), mirrored where `flips` says so."""
    px = out.shape[1]
    assert out.shape == (len(paths), px, px, 3) and out.flags.c_contiguous
    statuses = np.full(len(paths), _FOREIGN, np.int32)
    if _native is not None:
        whole = np.ascontiguousarray(boxes, np.int64), np.ascontiguousarray(flips).view(np.uint8)
        _native.decode_crops(paths, *whole, out, statuses, px, MAX_PIXELS, num_threads)

    def by_pillow(row: int) -> None:
        out[row] = pillow_decode.decode_crop(_read(paths[row]), boxes[row], px, bool(flips[row]))

    return _settle(paths, statuses, by_pillow, num_threads)


def _settle(
    paths: list[bytes], statuses: NDArray[np.int32], by_pillow: Callable[[int], None], num_threads: int
) -> Reasons:
    """Give what is left to Pillow, and say why the rest has no pixels."""
    reasons: Reasons = {}
    for row in np.flatnonzero((statuses != _OK) & (statuses != _FOREIGN)).tolist():
        status = int(statuses[row])
        if status == _OUT_OF_MEMORY:
            raise MemoryError(f"no memory to decode {os.fsdecode(paths[row])}")
        reasons[row] = _why_unreadable(paths[row]) if status == _UNREADABLE else _REASONS[status]
    foreign = np.flatnonzero(statuses == _FOREIGN).tolist()
    return reasons | dict(_by_pillow(foreign, by_pillow, num_threads))


def _by_pillow(rows: list[int], work: Callable[[int], None], num_threads: int) -> Iterable[tuple[int, str]]:
    def attempt(row: int) -> str | None:
        try:
            work(row)
        except BadImage as error:
            return str(error)
        return None

    if not rows:
        return []
    with ThreadPoolExecutor(num_threads, thread_name_prefix="pillow") as pool:
        return [(row, reason) for row, reason in zip(rows, pool.map(attempt, rows), strict=True) if reason is not None]


def _read(path: bytes) -> bytes:
    """The file's bytes; a fault that may pass is not a bad image, and ends the run."""
    try:
        return Path(os.fsdecode(path)).read_bytes()
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise BadImage(error.strerror) from None


def _why_unreadable(path: bytes) -> str:
    """Why the native decoder could not read a file; raises what may pass, since leaving the image out would not."""
    try:
        about = os.stat(path)  # noqa: PTH116
        if not stat.S_ISREG(about.st_mode):
            return "not a file"
        if about.st_size > _MAX_FILE_BYTES:
            return f"the file has {about.st_size} bytes, more than {_MAX_FILE_BYTES}"
        os.close(os.open(path, os.O_RDONLY))
    except (FileNotFoundError, PermissionError) as error:
        return error.strerror or type(error).__name__
    raise OSError(5, "could not be read just now", os.fsdecode(path))
