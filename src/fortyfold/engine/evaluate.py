"""Top-1, top-5 and loss over a set of images, each counted exactly once."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import torch
from torch.nn import functional

from fortyfold.data.index import Index
from fortyfold.data.reader import Batch, Reader
from fortyfold.data.requests import eval_requests, rectangular_requests
from fortyfold.engine.device import Feeder
from fortyfold.engine.stop import StopFlag


@dataclass(frozen=True)
class Evaluation:
    top1: float  # per cent of the readable images
    top5: float
    loss: float
    num_images: int  # readable ones
    unreadable: list[tuple[int, str]]  # sample id and reason

    def __str__(self) -> str:
        beside = f", {len(self.unreadable)} unreadable left out" if self.unreadable else ""
        return f"top-1 {self.top1:.1f} % ({self.num_images} images{beside})"


def evaluate(
    model: torch.nn.Module, batches: Iterator[Batch], feed: Feeder, stop: StopFlag | None = None
) -> Evaluation | None:
    """Evaluate `model` on `batches`; None when asked to stop before the end. The model is left in train mode."""
    totals: torch.Tensor | None = None
    unreadable: list[tuple[int, str]] = []
    model.eval()
    try:
        with torch.inference_mode():
            for batch in batches:
                if stop is not None and stop.requested:
                    return None
                on_device = feed(batch)
                counted = _count(model(on_device.images), on_device.labels, on_device.weights)
                totals = counted if totals is None else totals + counted
                unreadable += batch.bad
    finally:
        model.train()
    assert totals is not None, "a split has at least one image"
    correct1, correct5, loss, num_images = totals.tolist()  # the one wait for the device
    share = 1 / max(num_images, 1)
    return Evaluation(100 * correct1 * share, 100 * correct5 * share, loss * share, round(num_images), unreadable)


@dataclass(frozen=True)
class Scores:
    centre: Evaluation
    rectangle: Evaluation | None


@dataclass(frozen=True)
class Views:
    """How the images are looked at."""

    px: int
    crop_ratio: float
    rectangular: bool
    rank_batch: int


def evaluate_split(
    model: torch.nn.Module,
    reader: Reader,
    feed: Feeder,
    index: Index,
    views: Views,
    stop: StopFlag | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Scores | None:
    """Centre crops of all images and, if wanted, rectangles; None when asked to stop before the end.

    `report` hears how many images are done, of how many.
    """
    shape = views.px, views.crop_ratio, views.rank_batch
    passes = [eval_requests(index, *shape)]
    if views.rectangular:
        passes.append(rectangular_requests(index, reader.sizes(index), *shape))
    results = []
    for number, requests in enumerate(passes):
        with closing(reader.stream(requests)) as batches:
            watched = _reported(batches, number * len(index), len(passes) * len(index), report)
            result = evaluate(model, feed.ahead(watched), feed, stop)
        if result is None:
            return None
        results.append(result)
    return Scores(results[0], results[1] if views.rectangular else None)


def _reported(
    batches: Iterator[Batch], done: int, total: int, report: Callable[[int, int], None] | None
) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        done += len(batch)
        if report is not None:
            report(done, total)


def _count(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sums over a batch: right at first, right in five, loss, images."""
    logits = logits.float()
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    rows = [
        best[:, 0],
        best.any(dim=1),
        functional.cross_entropy(logits, labels, reduction="none"),
        labels >= 0,
    ]
    return torch.stack([torch.dot(row.double(), weights.double()) for row in rows])
