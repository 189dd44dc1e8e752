"""Batches of uint8 NHWC pixels, made by threads ahead of use, starting at any step at once.

Guaranteed: the order, the crops and the substitutes depend on (seed, epoch, sample id) only, never on the
number of threads. At most `prefetch` + 1 batches exist at a time. An unreadable image is named in the
batch's `bad`; its place carries another image's pixels with weight 0.

Threads and not processes: decoding and resizing need no GIL, and nothing is pickled or copied.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fortyfold.data import augment, order
from fortyfold.data.decode import Boxes, Reasons, Sizes, decode_crops, read_sizes
from fortyfold.data.index import Index
from fortyfold.data.order import Ids
from fortyfold.spec.timeline import Timeline

_SUBSTITUTES = 8  # other images tried in place of an unreadable one

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
        """One thread makes batch after batch; the decoder's own threads share the work within one."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
        ahead: deque[Future[Batch]] = deque()
        try:
            for request in requests:
                ahead.append(pool.submit(self._make, request))
                if len(ahead) > self._prefetch:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _make(self, request: Request) -> Batch:
        num_images = len(request.ids)
        images = self._allocate((num_images, request.px, request.px, 3))
        reasons = self._decode(request.ids, request, np.arange(num_images), images)
        weights = np.ones(num_images, np.float32)
        weights[list(reasons)] = 0
        self._substitute(request, sorted(reasons), images)
        bad = sorted((int(request.ids[row]), reason) for row, reason in reasons.items())
        return Batch(images, self._index.labels[request.ids].astype(np.int64), weights, request.ids, bad)

    def _decode(self, samples: Ids, request: Request, rows: Ids, out: NDArray[np.uint8]) -> Reasons:
        """Files `samples`, cropped and mirrored as the request's `rows` want it, into `out`."""
        paths = [self._index.path_bytes(sample) for sample in samples.tolist()]
        sizes, reasons = self._sizes(samples, paths)
        boxes = request.crops(request.ids[rows], sizes)
        return decode_crops(paths, boxes, request.flips[rows], out, self._num_threads) | reasons

    def _sizes(self, samples: Ids, paths: list[bytes]) -> tuple[Sizes, Reasons]:
        """From the index as far as they are known; the others are read once, and remembered."""
        known = self._index.known_sizes
        unknown = np.flatnonzero(known[samples, 0] == 0)
        reasons: Reasons = {}
        if len(unknown):
            read, failed = read_sizes([paths[row] for row in unknown], self._num_threads)
            reasons = {int(unknown[row]): reason for row, reason in failed.items()}
            good = [row for row in range(len(unknown)) if row not in failed]
            known[samples[unknown[good]]] = read[good]
        return np.maximum(known[samples], 1).astype(np.int64), reasons

    def _substitute(self, request: Request, rows: list[int], images: NDArray[np.uint8]) -> None:
        """Fill the places of unreadable images: with the first of their substitutes that can be read, or black."""
        for attempt in range(request.substitutes.shape[1]):
            if not rows:
                return
            pixels = np.zeros((len(rows), *images.shape[1:]), np.uint8)
            reasons = self._decode(request.substitutes[rows, attempt], request, np.array(rows), pixels)
            images[rows] = pixels
            rows = [rows[number] for number in sorted(reasons)]
        images[rows] = 0


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
