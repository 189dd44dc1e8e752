"""Top-1, top-5 and loss over a set of images, each counted exactly once.

Every result has a name, made of what was scored and how: "" is the network on centre crops; ema_ its moving
average; flip_ the mean over an image and its mirror image; rect_ rectangles instead of squares.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from fortyfold.data import order
from fortyfold.data.index import Index
from fortyfold.data.reader import Batch, Reader
from fortyfold.data.requests import eval_requests, fewest_eval_batches, rectangular_requests
from fortyfold.engine.device import Feeder
from fortyfold.parallel.ranks import Ranks


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


Scores = dict[str, Evaluation]  # by name


@dataclass(frozen=True)
class Networks:
    """What is scored, by the name's first part ("" and perhaps "ema_"), and what it computes in."""

    by_name: Mapping[str, torch.nn.Module]
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Company:
    """Who evaluates together, each a share of the images, and whether they are asked to stop."""

    ranks: Ranks = field(default_factory=Ranks)
    stopping: Callable[[], bool] = lambda: False
    """Asked before each batch that every rank has; all get the same answer."""


def evaluate(
    networks: Networks,
    batches: Iterator[Batch],
    feed: Feeder,
    company: Company | None = None,
    flip: bool = False,
    num_asked: int = sys.maxsize,
) -> Scores | None:
    """Score the networks on this rank's `batches` and add up over the ranks; None when asked to stop before the end.
    The networks are left in their modes. The first `num_asked` batches are those that every rank has."""
    company = company or Company()
    names = [f"{name}{kind}" for name in networks.by_name for kind in (("", "flip_") if flip else ("",))]
    totals = dict.fromkeys(names, torch.zeros(4, dtype=torch.float64, device=feed.device))
    unreadable: list[tuple[int, str]] = []
    with _evaluating(networks), torch.inference_mode():
        for number, batch in enumerate(batches):
            if number < num_asked and company.stopping():
                return None
            on_device = feed(batch)
            with networks.autocast():
                answers = dict(_answers(networks, on_device.images, flip))
            for name, logits in answers.items():
                totals[name] = totals[name] + _count(logits, on_device.labels, on_device.weights)
            unreadable += batch.bad
    sums = company.ranks.sum(torch.stack(list(totals.values()))).tolist()  # the one wait for the device
    everywhere = [(sample, reason) for found in company.ranks.gather(unreadable) for sample, reason in found]
    return {name: _evaluation(row, everywhere) for name, row in zip(totals, sums, strict=True)}


@dataclass(frozen=True)
class Views:
    """How the images are looked at."""

    px: int
    crop_ratio: float
    rectangular: bool
    flip: bool
    rank_batch: int
    global_batch: int
    """Rectangles are those of so many images of like aspect ratio."""


def evaluate_split(
    networks: Networks,
    reader: Reader,
    feed: Feeder,
    index: Index,
    views: Views,
    company: Company | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Scores | None:
    """Centre crops of all images and, if wanted, rectangles; None when asked to stop before the end.

    `report` hears how many of this rank's images are done, of how many.
    """
    company = company or Company()
    world = company.ranks.world
    passes = {"": eval_requests(index, views.px, views.crop_ratio, views.rank_batch, world)}
    if views.rectangular:
        shape = views.px, views.crop_ratio, views.global_batch, world
        passes["rect_"] = rectangular_requests(index, reader.sizes(index), *shape)
    scores: Scores = {}
    # All ranks have so many batches: of a batch of rectangles each has its share.
    num_asked = fewest_eval_batches(len(index), views.rank_batch, world)
    num_groups = -(-len(index) // views.global_batch)
    asked = {"": num_asked, "rect_": num_groups if len(index) // num_groups >= world.size else 0}
    num_images = len(range(len(index))[order.cut(len(index), world.rank, world.size)])
    for number, (kind, requests) in enumerate(passes.items()):
        with closing(reader.stream(requests)) as batches:
            watched = _reported(batches, number * num_images, len(passes) * num_images, report)
            found = evaluate(
                networks,
                feed.ahead(watched),
                feed,
                company,
                views.flip and not kind,
                asked[kind],
            )
        if found is None:
            return None
        scores |= {f"{name}{kind}": result for name, result in found.items()}
    return scores


@contextmanager
def _evaluating(networks: Networks) -> Iterator[None]:
    """Networks in evaluation mode; afterwards as they were."""
    training = [network for network in networks.by_name.values() if network.training]
    try:
        for network in training:
            network.eval()
        yield
    finally:
        for network in training:
            network.train()


def _answers(networks: Networks, images: torch.Tensor, flip: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for name, network in networks.by_name.items():
        logits = network(images).float()
        yield name, logits
        if flip:
            yield f"{name}flip_", (logits + network(images.flip(3)).float()) / 2


def _reported(
    batches: Iterator[Batch], done: int, total: int, report: Callable[[int, int], None] | None
) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        done += len(batch)
        if report is not None:
            report(done, total)


def _count(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sums over a batch: right at first, right in five, loss, images. Of soft labels the largest is the right one."""
    right = labels.argmax(dim=1) if labels.is_floating_point() else labels
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices == right[:, None]
    rows = [
        best[:, 0],
        best.any(dim=1),
        functional.cross_entropy(logits, labels, reduction="none"),
        right >= 0,
    ]
    return torch.stack([torch.dot(row.double(), weights.double()) for row in rows])


def _evaluation(sums: list[float], unreadable: list[tuple[int, str]]) -> Evaluation:
    correct1, correct5, loss, num_images = sums
    share = 1 / max(num_images, 1)
    return Evaluation(100 * correct1 * share, 100 * correct5 * share, loss * share, round(num_images), unreadable)
