"""Decoding with NVIDIA DALI: encoded bytes and boxes in, uint8 NHWC pixels out, on the CPU or on a GPU ("mixed").

Guaranteed: an image's pixels, or the reason why it has none, depend on its bytes, box and flip only, never on its
neighbours in the batch. DALI fails a whole batch for one bad image and says seldom which; the batch is then halved
until the bad ones stand alone, and Pillow has the last word on those: pixels, or a reason. To Pillow at once goes
what is no JPEG, what does not end as one (DALI reads a truncated file as far as the crop needs it) and what claims
an absurd size (DALI takes gigabytes before it gives up), and what must be transposed.

DALI is imported when a decoder is made. A decoder is for one thread at a time; it works on `num_threads` of its own.
"""

import struct
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fortyfold.data import pillow_decode
from fortyfold.data.decode import Boxes, Reasons, StageSeconds, read_image
from fortyfold.data.pillow_decode import MAX_PIXELS, BadImage
from fortyfold.data.places import Places
from fortyfold.data.turns import MIRROR_COLUMNS, MIRROR_ROWS, TRANSPOSE, Turns
from fortyfold.spec.errors import UserError

_SEGMENT = struct.Struct(">BBHBHH")  # and, if the marker is a frame's: precision, height, width
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_OPERATOR = "fn.decoders.image_slice"


class DaliDecoder:
    """Keeps a pipeline for each image size; `device` is "cpu", or "mixed" for the GPU `device_id`."""

    def __init__(self, num_threads: int, device: str = "cpu", device_id: int | None = None) -> None:
        assert device in ("cpu", "mixed") and (device == "cpu") == (device_id is None)
        version()
        self._num_threads = num_threads
        self._device = device
        self._device_id = device_id
        self._pipelines: dict[_Shape, Any] = {}

    def decode_crops(
        self, places: Places, boxes: Boxes, turns: Turns, out: NDArray[np.uint8], num_threads: int, interpolation: str
    ) -> tuple[Reasons, StageSeconds]:
        """As data/decode.py's function of that name, but the times are the clock's, not the threads'."""
        started = time.perf_counter()
        with ThreadPoolExecutor(num_threads, thread_name_prefix="dali") as pool:
            found = list(pool.map(lambda row: _read(places, row), range(len(places))))
            read = time.perf_counter()
            reasons = {row: str(reason) for row, reason in enumerate(found) if isinstance(reason, BadImage)}
            blobs = [b"" if isinstance(blob, BadImage) else blob for blob in found]
            work = _Work(blobs, boxes, turns, out, interpolation)
            taken = np.array([_is_for_dali(blob) for blob in blobs], bool) & (turns & TRANSPOSE == 0)
            left = sorted(np.flatnonzero(~taken).tolist() + self._by_dali(np.flatnonzero(taken), work))
            left = [row for row in left if row not in reasons]
            answers = zip(left, pool.map(work.by_pillow, left), strict=True)
            reasons |= {row: reason for row, reason in answers if reason is not None}
        return reasons, StageSeconds(read=read - started, decode=time.perf_counter() - read)

    def _by_dali(self, rows: NDArray[np.int64], work: "_Work") -> list[int]:
        """Fill the `rows` of the output; gives those that DALI does not take."""
        if not len(rows):
            return []
        _, height, width, _ = work.out.shape
        num_rows = 1 << (len(rows) - 1).bit_length()  # few sizes of batch, so few pipelines
        key = _Shape(height, width, num_rows, work.interpolation)
        if key not in self._pipelines:
            self._pipelines[key] = _build(key, self._num_threads, self._device, self._device_id)
        try:
            pixels = _run(self._pipelines[key], [work.blobs[row] for row in rows], work.boxes[rows], work.turns[rows])
        except RuntimeError as error:
            del self._pipelines[key]  # after a failure it may not be used again
            if _OPERATOR not in str(error) or "cudaError" in str(error):
                raise
        else:
            work.out[rows] = pixels
            return []
        if len(rows) == 1:
            return [int(rows[0])]
        half = len(rows) // 2
        return [row for part in (rows[:half], rows[half:]) for row in self._by_dali(part, work)]


class _Shape(NamedTuple):
    """What a pipeline is built for."""

    height: int
    width: int
    max_rows: int
    interpolation: str


@dataclass(frozen=True)
class _Work:
    """One batch."""

    blobs: list[bytes]
    boxes: Boxes
    turns: Turns
    out: NDArray[np.uint8]
    interpolation: str

    def by_pillow(self, row: int) -> str | None:
        _, height, width, _ = self.out.shape
        how = self.boxes[row], width, height, int(self.turns[row]), self.interpolation
        try:
            self.out[row] = pillow_decode.decode_crop(self.blobs[row], *how)
        except BadImage as error:
            return str(error)
        return None


def _read(places: Places, row: int) -> bytes | BadImage:
    try:
        return read_image(places, row)
    except BadImage as error:
        return error


def _is_for_dali(blob: bytes) -> bool:
    """A JPEG that ends as one, with a size in its header for which memory may be taken."""
    place = 2  # after SOI, of the next segment: 0xff, marker, length
    while blob.startswith(b"\xff\xd8") and blob.endswith(b"\xff\xd9") and place + 9 < len(blob):
        _, marker, length, _, height, width = _SEGMENT.unpack_from(blob, place)
        if marker in _FRAMES:
            return 0 < int(width) * int(height) <= MAX_PIXELS
        place += 2 + int(length)
    return False


def version() -> str:
    """DALI's version; a UserError where it is not installed."""
    try:
        import nvidia.dali
    except ImportError:
        raise UserError('data.backend = "dali" needs NVIDIA DALI; pip install fortyfold[dali]') from None
    return str(nvidia.dali.__version__)


def _build(shape: _Shape, num_threads: int, device: str, device_id: int | None) -> Any:
    """A pipeline that runs when asked, not ahead."""
    from nvidia.dali import Pipeline, fn, types

    pipeline = Pipeline(shape.max_rows, num_threads, device_id, prefetch_queue_depth=1)
    with pipeline:
        blob = fn.external_source(name="blob", dtype=types.UINT8, ndim=1)
        corner = fn.external_source(name="corner", dtype=types.INT32, ndim=1)  # (top, left)
        side = fn.external_source(name="side", dtype=types.INT32, ndim=1)  # (height, width)
        columns = fn.external_source(name="columns", dtype=types.INT32, ndim=0)
        rows = fn.external_source(name="rows", dtype=types.INT32, ndim=0)
        image = fn.decoders.image_slice(
            blob, corner, side, axes=[0, 1], normalized_anchor=False, normalized_shape=False,
            output_type=types.RGB, adjust_orientation=False, jpeg_fancy_upsampling=True, device=device,
        )  # fmt: skip
        bicubic = shape.interpolation == "bicubic"
        kind = types.INTERP_CUBIC if bicubic else types.INTERP_TRIANGULAR
        image = fn.resize(image, size=[shape.height, shape.width], interp_type=kind, antialias=True)
        pipeline.set_outputs(fn.flip(image, horizontal=columns, vertical=rows))
    pipeline.build()
    return pipeline


def _run(pipeline: Any, blobs: list[bytes], boxes: Boxes, turns: Turns) -> NDArray[np.uint8]:
    pipeline.feed_input("blob", [np.frombuffer(blob, np.uint8) for blob in blobs])
    pipeline.feed_input("corner", np.ascontiguousarray(boxes[:, [1, 0]], np.int32))
    pipeline.feed_input("side", np.ascontiguousarray(boxes[:, [3, 2]] - boxes[:, [1, 0]], np.int32))
    pipeline.feed_input("columns", (turns & MIRROR_COLUMNS != 0).astype(np.int32))
    pipeline.feed_input("rows", (turns & MIRROR_ROWS != 0).astype(np.int32))
    (images_nhwc,) = pipeline.run()
    pixels: NDArray[np.uint8] = images_nhwc.as_cpu().as_array()
    return pixels
