"""Batches of uint8 NHWC pixels, made by threads ahead of use, starting at any step at once.

Guaranteed: the order, the crops and the substitutes depend on (seed, epoch, sample id) only, never on the
number of threads. At most `prefetch` + 1 batches exist at a time. An unreadable image is named in the
batch's `bad`; its place carries another image's pixels with weight 0.

Threads and not processes: Pillow decodes and resizes without the GIL, and nothing is pickled or copied.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fortyfold.data import augment, order
from fortyfold.data.augment import Boxes, Sizes
from fortyfold.data.decode import BadImage, decode_crop, read_size
from fortyfold.data.index import Index
from fortyfold.data.order import Ids
from fortyfold.spec.timeline import Timeline

_SUBSTITUTES = 8  # other images tried in place of an unreadable one

# A file that is not there or not ours to read is a bad image. Any other fault of the disk may pass, and
# leaving the image out would change the weights: that ends the run, which goes on from its checkpoint.
BAD = (BadImage, FileNotFoundError, PermissionError, IsADirectoryError)

Allocate = Callable[[tuple[int, ...]], NDArray[np.uint8]]


@dataclass(frozen=True)
class Batch:
    """One step's images on the host."""

    images_nhwc: NDArray[np.uint8]
    labels: NDArray[np.int64]
    weights: NDArray[np.float32]  # 1, or 0 for an unreadable image's place
    ids: Ids
    bad: list[tuple[int, str]] = field(default_factory=list)  # (sample id, reason)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Request:
    """What a batch shall hold: the samples, and how each is cropped once its size is known."""

    ids: Ids
    px: int
    crops: Callable[[Ids, Sizes], Boxes]
    flips: NDArray[np.bool_]
    substitutes: NDArray[np.int64]  # a row a sample: the ids to try in its place


class Loader:
    """Reads one split; `num_threads` and `prefetch` change the speed and nothing else."""

    def __init__(self, index: Index, num_threads: int, prefetch: int = 2, allocate: Allocate | None = None) -> None:
        self._index = index
        self._num_threads = num_threads
        self._prefetch = prefetch
        self._allocate = allocate or (lambda shape: np.empty(shape, np.uint8))

    def train_batches(
        self, timeline: Timeline, seed: int, tail: str, flip: bool, first_step: int = 0
    ) -> Generator[Batch, None, None]:
        """The batches of steps `first_step`… to the end of the run."""
        steps = range(first_step, timeline.num_steps)
        return self._stream(train_request(len(self._index), timeline, seed, tail, flip, step) for step in steps)

    def eval_batches(self, px: int, crop_ratio: float, rank_batch: int) -> Generator[Batch, None, None]:
        """Every image once, in order, centre-cropped."""
        num_batches = -(-len(self._index) // rank_batch)
        cuts = (order.cut(len(self._index), batch, num_batches) for batch in range(num_batches))
        return self._stream(eval_request(np.arange(part.start, part.stop), px, crop_ratio) for part in cuts)

    def _stream(self, requests: Iterator[Request]) -> Generator[Batch, None, None]:
        pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="loader")
        ahead: deque[tuple[Batch, list[Future[None]]]] = deque()
        try:
            for request in requests:
                ahead.append(self._submit(pool, request))
                if len(ahead) > self._prefetch:
                    yield _finished(*ahead.popleft())
            while ahead:
                yield _finished(*ahead.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, request: Request) -> tuple[Batch, list[Future[None]]]:
        num_images = len(request.ids)
        batch = Batch(
            images_nhwc=self._allocate((num_images, request.px, request.px, 3)),
            labels=self._index.labels[request.ids].astype(np.int64),
            weights=np.ones(num_images, np.float32),
            ids=request.ids,
        )
        num_pieces = min(num_images, 4 * self._num_threads)  # small enough for the threads to end together
        pieces = (order.cut(num_images, piece, num_pieces) for piece in range(num_pieces))
        return batch, [pool.submit(self._fill, batch, request, piece) for piece in pieces]

    def _fill(self, batch: Batch, request: Request, piece: slice) -> None:
        """Decode one piece of a batch into place."""
        blobs: dict[int, bytes] = {}
        sizes = np.ones((piece.stop - piece.start, 2), np.int64)
        for row in range(piece.start, piece.stop):
            try:
                blobs[row], sizes[row - piece.start] = self._open(int(request.ids[row]))
            except BAD as error:
                self._substitute(batch, request, row, str(error))
        boxes = request.crops(request.ids[piece], sizes)
        for row, blob in blobs.items():
            try:
                box = boxes[row - piece.start]
                batch.images_nhwc[row] = decode_crop(blob, box, request.px, bool(request.flips[row]))
            except BAD as error:
                self._substitute(batch, request, row, str(error))

    def _open(self, sample: int) -> tuple[bytes, tuple[int, int]]:
        blob = Path(self._index.path(sample)).read_bytes()
        return blob, read_size(blob)

    def _substitute(self, batch: Batch, request: Request, row: int, reason: str) -> None:
        batch.bad.append((int(request.ids[row]), reason))
        batch.weights[row] = 0
        batch.images_nhwc[row] = 0
        for other in request.substitutes[row].tolist():
            try:
                blob, size = self._open(other)
                box = request.crops(request.ids[row : row + 1], np.array([size]))[0]
                batch.images_nhwc[row] = decode_crop(blob, box, request.px, bool(request.flips[row]))
                return
            except BAD:
                continue


def train_request(num_samples: int, timeline: Timeline, seed: int, tail: str, flip: bool, step: int) -> Request:
    """What step `step` trains on, over all ranks."""
    position = timeline.at(step)
    stretch, epoch = position.stretch, position.epoch
    ids = order.batch_ids(
        num_samples, seed, epoch, position.step_in_epoch, stretch.steps_per_epoch, stretch.global_batch, tail
    )
    draws = augment.uniforms(ids, seed, epoch, augment.SUBSTITUTE, _SUBSTITUTES)
    return Request(
        ids=ids,
        px=stretch.px,
        crops=lambda ids, sizes: augment.random_crops(ids, sizes, seed, epoch, stretch.min_scale),
        flips=augment.flips(ids, seed, epoch) if flip else np.zeros(len(ids), bool),
        substitutes=(draws * num_samples).astype(np.int64),
    )


def eval_request(ids: Ids, px: int, crop_ratio: float) -> Request:
    """Centre crops of the samples `ids`; an unreadable one is left out, not replaced."""
    return Request(
        ids=ids,
        px=px,
        crops=lambda ids, sizes: augment.centre_crops(sizes, crop_ratio),
        flips=np.zeros(len(ids), bool),
        substitutes=np.empty((len(ids), 0), np.int64),
    )


def _finished(batch: Batch, pieces: list[Future[None]]) -> Batch:
    for piece in pieces:
        piece.result()
    batch.bad.sort()
    return batch
