"""Decoding with NVIDIA DALI: encoded bytes and boxes in, uint8 NHWC pixels out, on the CPU or on a GPU ("mixed").

Guaranteed: an image's pixels, or the reason why it has none, depend on its bytes, box and flip only, never on its
neighbours in the batch. DALI fails a whole batch for one bad image and says seldom which; the batch is then halved
until the bad ones stand alone, and Pillow has the last word on those: pixels, or a reason. To Pillow at once goes
what is no JPEG, what does not end as one (DALI reads a truncated file as far as the crop needs it) and what claims
an absurd size (DALI takes gigabytes before it gives up). As everywhere here, EXIF orientation is not applied.

DALI is imported when a decoder is made. A decoder is for one thread at a time; it works on `num_threads` of its own.
"""

import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fortyfold.data import pillow_decode
from fortyfold.data.pillow_decode import MAX_PIXELS, BadImage
from fortyfold.spec.errors import UserError

_SEGMENT = struct.Struct(">BBHBHH")  # and, if the marker is a frame's: precision, height, width
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_OPERATOR = "fn.decoders.image_slice"


class DaliDecoder:
    """Keeps a pipeline for each image size; `device` is "cpu", or "mixed" for the GPU `device_id`."""

    def __init__(self, num_threads: int, device: str = "cpu", device_id: int | None = None) -> None:
        assert device in ("cpu", "mixed") and (device == "cpu") == (device_id is None)
        _require_dali()
        self._num_threads = num_threads
        self._device = device
        self._device_id = device_id
        self._pipelines: dict[tuple[int, int], Any] = {}

    def decode_crops(
        self, blobs: Sequence[bytes], boxes: NDArray[np.int64], flips: NDArray[np.bool_], out: NDArray[np.uint8]
    ) -> dict[int, str]:
        """The box of each image, resized to `out`'s px × px (antialiased bilinear), mirrored where `flips` says so.

        Gives the reason of each row without pixels.
        """
        assert out.shape == (len(blobs), out.shape[1], out.shape[1], 3)
        taken = np.array([_is_for_dali(blob) for blob in blobs], bool)
        refused = self._by_dali(np.flatnonzero(taken), blobs, boxes, flips, out)

        def by_pillow(row: int) -> str | None:
            try:
                out[row] = pillow_decode.decode_crop(blobs[row], boxes[row], out.shape[1], bool(flips[row]))
            except BadImage as error:
                return str(error)
            return None

        left = sorted(np.flatnonzero(~taken).tolist() + refused)
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="pillow") as pool:
            answers = zip(left, pool.map(by_pillow, left), strict=True)
            return {row: reason for row, reason in answers if reason is not None}

    def _by_dali(
        self,
        rows: NDArray[np.int64],
        blobs: Sequence[bytes],
        boxes: NDArray[np.int64],
        flips: NDArray[np.bool_],
        out: NDArray[np.uint8],
    ) -> list[int]:
        """Fill the `rows` of `out`; gives those that DALI does not take."""
        if not len(rows):
            return []
        key = (out.shape[1], 1 << (len(rows) - 1).bit_length())  # few sizes of batch, so few pipelines
        if key not in self._pipelines:
            self._pipelines[key] = _build(*key, self._num_threads, self._device, self._device_id)
        try:
            pixels = _run(self._pipelines[key], [blobs[row] for row in rows], boxes[rows], flips[rows])
        except RuntimeError as error:
            del self._pipelines[key]  # after a failure it may not be used again
            if _OPERATOR not in str(error) or "cudaError" in str(error):
                raise
        else:
            out[rows] = pixels
            return []
        if len(rows) == 1:
            return [int(rows[0])]
        half = len(rows) // 2
        return [row for part in (rows[:half], rows[half:]) for row in self._by_dali(part, blobs, boxes, flips, out)]


def _is_for_dali(blob: bytes) -> bool:
    """A JPEG that ends as one, with a size in its header for which memory may be taken."""
    place = 2  # after SOI, of the next segment: 0xff, marker, length
    while blob.startswith(b"\xff\xd8") and blob.endswith(b"\xff\xd9") and place + 9 < len(blob):
        _, marker, length, _, height, width = _SEGMENT.unpack_from(blob, place)
        if marker in _FRAMES:
            return 0 < int(width) * int(height) <= MAX_PIXELS
        place += 2 + int(length)
    return False


def _require_dali() -> None:
    try:
        import nvidia.dali  # noqa: F401
    except ImportError:
        raise UserError('data.backend = "dali" needs NVIDIA DALI; pip install fortyfold[dali]') from None


def _build(px: int, max_rows: int, num_threads: int, device: str, device_id: int | None) -> Any:
    """A pipeline that runs when asked, not ahead."""
    from nvidia.dali import Pipeline, fn, types

    pipeline = Pipeline(max_rows, num_threads, device_id, prefetch_queue_depth=1)
    with pipeline:
        blob = fn.external_source(name="blob", dtype=types.UINT8, ndim=1)
        corner = fn.external_source(name="corner", dtype=types.INT32, ndim=1)  # (top, left)
        side = fn.external_source(name="side", dtype=types.INT32, ndim=1)  # (height, width)
        flip = fn.external_source(name="flip", dtype=types.INT32, ndim=0)
        image = fn.decoders.image_slice(
            blob, corner, side, axes=[0, 1], normalized_anchor=False, normalized_shape=False,
            output_type=types.RGB, adjust_orientation=False, jpeg_fancy_upsampling=True, device=device,
        )  # fmt: skip
        image = fn.resize(image, size=[px, px], interp_type=types.INTERP_TRIANGULAR, antialias=True)
        pipeline.set_outputs(fn.flip(image, horizontal=flip))
    pipeline.build()
    return pipeline


def _run(pipeline: Any, blobs: list[bytes], boxes: NDArray[np.int64], flips: NDArray[np.bool_]) -> NDArray[np.uint8]:
    pipeline.feed_input("blob", [np.frombuffer(blob, np.uint8) for blob in blobs])
    pipeline.feed_input("corner", np.ascontiguousarray(boxes[:, [1, 0]], np.int32))
    pipeline.feed_input("side", np.ascontiguousarray(boxes[:, [3, 2]] - boxes[:, [1, 0]], np.int32))
    pipeline.feed_input("flip", flips.astype(np.int32))
    (images_nhwc,) = pipeline.run()
    pixels: NDArray[np.uint8] = images_nhwc.as_cpu().as_array()
    return pixels
