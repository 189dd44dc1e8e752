"""One training step. Nothing here waits for the device."""

import torch
from torch.nn import functional

from fortyfold.engine.device import DeviceBatch


def take_step(
    batch: DeviceBatch, model: torch.nn.Module, optimizer: torch.optim.Optimizer, label_smoothing: float
) -> torch.Tensor:
    """Forward, backward, update; gives the loss, still on the device."""
    loss = weighted_loss(model(batch.images), batch, label_smoothing)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.detach()


def weighted_loss(logits: torch.Tensor, batch: DeviceBatch, label_smoothing: float) -> torch.Tensor:
    """The mean over the batch's places, in which an unreadable image's place counts 0.

    Divided by the number of places and not by the sum of the weights: the former is known without asking
    the device, or other ranks.
    """
    losses = functional.cross_entropy(logits, batch.labels, reduction="none", label_smoothing=label_smoothing)
    return torch.dot(losses, batch.weights) / len(batch.labels)
