"""The loss of each image: cross-entropy or a yes-or-no question a class, for labels, soft labels and mixed images."""

from collections.abc import Callable

import torch
from torch.nn import functional

from fortyfold.engine.device import DeviceBatch
from fortyfold.spec.recipe import Loss

Criterion = Callable[[torch.Tensor, DeviceBatch], torch.Tensor]


def build_loss(spec: Loss) -> Criterion:
    """From logits and a batch to a loss an image, in fp32."""
    if spec.name == "bce":
        return lambda logits, batch: _binary(logits.float(), targets(batch, logits.shape[1]), spec)

    def cross_entropy(logits: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        plain = batch.others is None
        wanted = batch.labels if plain else targets(batch, logits.shape[1])
        return functional.cross_entropy(logits.float(), wanted, reduction="none", label_smoothing=spec.label_smoothing)

    return cross_entropy


def targets(batch: DeviceBatch, num_classes: int) -> torch.Tensor:
    """A row an image with each class's share; mixed images have a share of two labels."""
    own = _dense(batch.labels, num_classes)
    if batch.others is None:
        return own
    assert batch.shares is not None
    shares = batch.shares[:, None]
    return own * shares + _dense(batch.others, num_classes) * (1 - shares)


def weighted_mean(losses: torch.Tensor, weights: torch.Tensor, num_places: float) -> torch.Tensor:
    """The mean over the places of the whole batch, in which an unreadable image's place counts 0.

    Divided by the number of places and not by the sum of the weights: the former is known without asking the
    device, or other ranks.
    """
    return torch.dot(losses, weights) / num_places


def _dense(labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    if labels.is_floating_point():
        return labels
    # Not functional.one_hot, which may look at the labels and so wait for the device.
    return (labels[:, None] == torch.arange(num_classes, device=labels.device)).float()


def _binary(logits: torch.Tensor, wanted: torch.Tensor, spec: Loss) -> torch.Tensor:
    num_classes = logits.shape[1]
    wanted = wanted * (1 - spec.label_smoothing) + spec.label_smoothing / num_classes
    if spec.bce_threshold is not None:
        wanted = (wanted > spec.bce_threshold).float()
    losses = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    return losses.sum(dim=1) if spec.bce_sum_classes else losses.mean(dim=1)
