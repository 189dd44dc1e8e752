"""Small learners and their batches, for the tests of the engine's parts."""

from typing import Any

import numpy as np
import torch

from fortyfold.data.reader import Batch
from fortyfold.engine.device import DeviceBatch
from fortyfold.engine.learner import Learner
from fortyfold.spec.recipe import Recipe


def recipe(**changes: Any) -> Recipe:
    raw = {
        "epochs": 1,
        "global_batch": 6,
        "model": {"name": "x"},
        "data": {"root": "x"},
        "optim": {"lr": 0.01, "weight_decay": 0.1},
    }
    return Recipe.model_validate({**raw, **changes})


def make_model(seed: int = 0) -> torch.nn.Module:
    """With a normalisation layer, dropout, and channels-last memory; for images of 8 px, 4 classes."""
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.Dropout(0.3),
        torch.nn.Flatten(),
        torch.nn.Linear(288, 4),
    )
    return layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def plain_model(seed: int = 0) -> torch.nn.Module:
    """Without normalisation and dropout, for images of 8 px, 3 classes."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 3))


def make_learner(spec: Recipe, seed: int = 0) -> Learner:
    return Learner(make_model(seed), spec)


def take_step(learner: Learner, batch: DeviceBatch, number: int, lr: float, accumulate: int = 1) -> torch.Tensor:
    loss = learner.backward(batch, lr, accumulate)
    learner.update(number)
    return loss


def train_steps(learner: Learner, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(6, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
        labels = torch.randint(0, 4, (6,), generator=generator)
        take_step(learner, DeviceBatch(images, labels, torch.ones(6)), step + 1, lr=0.01)


def make_batch(num_images: int = 6, px: int = 8, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (num_images, px, px, 3), np.uint8)
    return Batch(images, rng.integers(0, 3, num_images), np.ones(num_images, np.float32), np.arange(num_images))
