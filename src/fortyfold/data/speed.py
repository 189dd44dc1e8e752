"""How fast a split is read on this machine: the loader as a training uses it, and what of that the decoder takes.

The decoder alone (its calls, each with all threads) is the machine's own limit. Beside it there is Python, which holds
the interpreter's lock: order, crop boxes, paths, hand-over.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from fortyfold.data.decode import Reasons, StageSeconds
from fortyfold.data.index import Index
from fortyfold.data.reader import DecodeCrops, Reader
from fortyfold.data.requests import BatchShape, Request, Sampler, eval_requests
from fortyfold.spec.timeline import num_batches

_WARM_BATCHES = 3


@dataclass(frozen=True)
class Speed:
    num_images: int
    seconds: float
    decoder_seconds: float
    python_seconds: float
    """Processor time of Python, which holds the interpreter's lock: in the thread that makes batches, beside the
    decoder's calls, and in the one that asks for them."""
    stages: StageSeconds
    """Of the decoder's threads, together."""

    @property
    def images_per_second(self) -> float:
        return self.num_images / self.seconds

    @property
    def limit_images_per_second(self) -> float:
        """If there were nothing but the decoder."""
        return self.num_images / self.decoder_seconds

    @property
    def python_seconds_per_image(self) -> float:
        return self.python_seconds / self.num_images


class _Timed:
    """A decoder whose calls are timed."""

    def __init__(self, decode_crops: DecodeCrops) -> None:
        self._decode_crops = decode_crops
        self._left_at: float | None = None
        self.seconds = 0.0
        self.python_seconds = 0.0  # of the thread that calls, between two calls

    def __call__(self, *arguments: Any) -> tuple[Reasons, StageSeconds]:
        if self._left_at is not None:
            self.python_seconds += time.thread_time() - self._left_at
        started = time.perf_counter()
        result = self._decode_crops(*arguments)
        self.seconds += time.perf_counter() - started
        self._left_at = time.thread_time()
        return result


def measure(reader: Reader, requests: Iterator[Request], seconds: float) -> Speed:
    """Take batches for about `seconds`, as fast as they come."""
    timed = _Timed(reader.decode_crops)
    images, stages = 0, np.zeros(3)
    with closing(replace(reader, decode_crops=timed).stream(requests)) as batches:
        for _ in range(_WARM_BATCHES):
            next(batches)
        started, own_started = time.perf_counter(), time.thread_time()
        decoder_before, python_before = timed.seconds, timed.python_seconds
        while time.perf_counter() - started < seconds:
            batch = next(batches)
            images += len(batch)
            stages += batch.seconds
        taken, own = time.perf_counter() - started, time.thread_time() - own_started
        python = timed.python_seconds - python_before + own
        return Speed(images, taken, timed.seconds - decoder_before, python, StageSeconds(*stages.tolist()))


def endless_crops(index: Index, global_batch: int, px: int, min_scale: float) -> Iterator[Request]:
    """Random crops, epoch after epoch."""
    sampler, batches = Sampler(seed=0), num_batches(len(index), global_batch, "keep")
    shape = BatchShape(batches, global_batch, px, min_scale)
    for epoch in count():
        for batch in range(batches):
            yield sampler.request(index, epoch, batch, shape)


def endless_centres(index: Index, rank_batch: int, px: int, crop_ratio: float) -> Iterator[Request]:
    """Centre crops, again and again."""
    while True:
        yield from eval_requests(index, px, crop_ratio, rank_batch)
