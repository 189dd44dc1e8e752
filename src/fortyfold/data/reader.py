"""Turns requests into batches of uint8 NHWC pixels, ahead of use, in the order of the requests.

Guaranteed: pixels do not depend on the number of threads. At most `prefetch` + 1 batches exist at a time. An
unreadable image is named in the batch's `bad`; its place carries another image's pixels with weight 0.

Threads and not processes: decoding and resizing need no GIL, and nothing is pickled or copied.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fortyfold.data import decode, turns
from fortyfold.data.buffers import Buffers
from fortyfold.data.decode import Boxes, Headers, Reasons, Sizes, StageSeconds
from fortyfold.data.index import Index
from fortyfold.data.items import Items, Labels
from fortyfold.data.mix import Mix
from fortyfold.data.order import Ids
from fortyfold.data.pillow_decode import crop_image
from fortyfold.data.pixels import change_pixels
from fortyfold.data.places import Places
from fortyfold.data.requests import Request

_FETCH_THREADS = 16  # network disks answer slowly, not seldom

Allocate = Callable[[tuple[int, ...]], NDArray[np.uint8]]
DecodeCrops = Callable[
    [Places, Boxes, turns.Turns, NDArray[np.uint8], int, str], tuple[Reasons, StageSeconds]
]  # as data/decode.py's


class Decoded(NamedTuple):
    labels: Labels
    reasons: Reasons
    seconds: StageSeconds


@dataclass(frozen=True)
class Batch:
    """One step's images on the host; behind them, those that are there as partners of a mix only."""

    images_nhwc: NDArray[np.uint8]
    labels: Labels
    weights: NDArray[np.float32]  # 1, or 0 for an unreadable image's place
    ids: Ids  # of the batch, without mere partners
    bad: list[tuple[int, str]] = field(default_factory=list)  # (sample id, reason)
    seconds: StageSeconds = field(default_factory=StageSeconds)
    mix: Mix | None = None  # to be done on the device

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Reader:
    """`num_threads`, `prefetch` and `read_ahead` change the speed and nothing else."""

    num_threads: int
    prefetch: int = 2
    read_ahead: int = 0  # batches whose bytes are fetched before their turn
    upright: bool = False  # obey EXIF orientations
    interpolation: str = "bilinear"
    allocate: Allocate = field(default_factory=Buffers)
    decode_crops: DecodeCrops = decode.decode_crops

    def stream(self, requests: Iterable[Request]) -> Generator[Batch, None, None]:
        """One thread makes batch after batch; the decoder's own threads share the work within one."""
        maker = ThreadPoolExecutor(1, thread_name_prefix="loader")
        fetcher = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        waiting: deque[Request] = deque()  # being fetched
        made: deque[Future[Batch]] = deque()
        try:
            for request in requests:
                if self.read_ahead:
                    fetcher.submit(_fetch, request)
                waiting.append(request)
                if len(waiting) > self.read_ahead:
                    made.append(maker.submit(self._make, waiting.popleft()))
                if len(made) > self.prefetch:
                    yield made.popleft().result()
            while waiting or made:
                if waiting:
                    made.append(maker.submit(self._make, waiting.popleft()))
                if len(made) > self.prefetch or not waiting:
                    yield made.popleft().result()
        finally:
            fetcher.shutdown(wait=True, cancel_futures=True)
            maker.shutdown(wait=True, cancel_futures=True)

    def sizes(self, index: Index) -> Sizes:
        """(width, height) of every image; of unreadable ones 1 × 1. Headers that were never read are read."""
        headers, _ = self._headers(index, np.arange(len(index)))
        return self._looked_at(headers)[0]

    def _make(self, request: Request) -> Batch:
        num_images = len(request.ids)
        images = self.allocate((num_images, request.height, request.width, 3))
        labels, reasons, seconds = self._decode(request.ids, request, np.arange(num_images), images)
        weights = np.ones(num_images, np.float32)
        bad: list[tuple[int, str]] = []
        if reasons:
            weights[list(reasons)] = 0
            self._substitute(request, sorted(reasons), images)
            own = ((row, reason) for row, reason in reasons.items() if row < request.num_own)
            bad = sorted((int(request.ids[row]), reason) for row, reason in own)
        if request.changes is not None:
            changing = change_pixels(images, request.changes(), self.num_threads)
            seconds = seconds._replace(resize=seconds.resize + changing)
        mix = request.mix.sparing(weights == 0) if request.mix else None
        return Batch(images, labels, weights, request.ids[: request.num_own], bad, seconds, mix)

    def _decode(self, samples: Ids, request: Request, rows: Ids, out: NDArray[np.uint8]) -> Decoded:
        """Images `samples`, cropped and mirrored as the request's `rows` want it, into `out`."""
        if request.index.items is not None:
            return self._load(request.index.items, samples, request, rows, out)
        places = request.index.places(samples)
        headers, reasons = self._headers(request.index, samples)
        boxes, turned = self._aim(request, rows, headers)
        failed, seconds = self.decode_crops(places, boxes, turned, out, self.num_threads, self.interpolation)
        return Decoded(request.index.labels[samples].astype(np.int64), failed | reasons, seconds)

    def _load(self, items: Items, samples: Ids, request: Request, rows: Ids, out: NDArray[np.uint8]) -> Decoded:
        """The same of somebody's own items, each loaded, measured and cropped in one go."""
        labels, seconds = items.blank_labels(len(samples)), np.zeros((len(samples), 2))
        known = request.index.known_headers

        def load(number: int) -> None:
            started = time.perf_counter()
            item = items.load(int(samples[number]))
            loaded = time.perf_counter()
            labels[number] = item.label
            known[samples[number]] = header = item.header
            boxes, turned = self._aim(request, rows[number : number + 1], np.array([header]))
            how = request.width, request.height, int(turned[0]), self.interpolation
            out[number] = crop_image(item.image, boxes[0], *how)
            seconds[number] = loaded - started, time.perf_counter() - loaded

        reasons = decode.attempt(load, range(len(samples)), self.num_threads)
        read, resize = seconds.sum(axis=0).tolist()
        return Decoded(labels, reasons, StageSeconds(read=read, resize=resize))

    def _aim(self, request: Request, rows: Ids, headers: Headers) -> tuple[Boxes, turns.Turns]:
        """The boxes on the images as they are stored, and how to turn what is in them."""
        sizes, upright = self._looked_at(headers)
        boxes = turns.stored_boxes(request.crops(request.keys[rows], sizes), sizes, upright)
        return boxes, upright ^ request.flips[rows].astype(np.uint8) * np.uint8(turns.MIRROR_COLUMNS)

    def _looked_at(self, headers: Headers) -> tuple[Sizes, turns.Turns]:
        """Sizes as images are looked at, and what turns them so."""
        upright = turns.upright_turns(headers[:, 2] if self.upright else np.ones(len(headers), np.int64))
        return turns.turned_sizes(headers[:, :2], upright), upright

    def _headers(self, index: Index, samples: Ids) -> tuple[Headers, Reasons]:
        """From the index as far as known; others are read and remembered."""
        known = index.known_headers
        unknown = np.flatnonzero(known[samples, 0] == 0)
        reasons: Reasons = {}
        if len(unknown):
            read, failed = self._read_headers(index, samples[unknown])
            reasons = {int(unknown[row]): reason for row, reason in failed.items()}
            good = [row for row in range(len(unknown)) if row not in failed]
            known[samples[unknown[good]]] = read[good]
        return np.maximum(known[samples], 1).astype(np.int64), reasons

    def _read_headers(self, index: Index, samples: Ids) -> tuple[Headers, Reasons]:
        if index.items is not None:
            return index.items.read_headers(samples, self.num_threads)
        return decode.read_headers(index.places(samples), self.num_threads)

    def _substitute(self, request: Request, rows: list[int], images: NDArray[np.uint8]) -> None:
        """Fill the places of unreadable images: with the first of their substitutes that can be read, or black."""
        for attempt in range(request.substitutes.shape[1]):
            if not rows:
                return
            pixels = np.zeros((len(rows), *images.shape[1:]), np.uint8)
            _, reasons, _ = self._decode(request.substitutes[rows, attempt], request, np.array(rows), pixels)
            images[rows] = pixels
            rows = [rows[number] for number in sorted(reasons)]
        images[rows] = 0


def _fetch(request: Request) -> None:
    decode.fetch(request.fetch(), _FETCH_THREADS)
