"""How ranks agree. A strategy is a file here with `build(parts) -> Strategy`, and its file's name is its name."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fortyfold.parallel.ranks import Ranks
from fortyfold.spec import plugin
from fortyfold.spec.recipe import Strategy as Spec

Network = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Parts:
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    spec: Spec
    ranks: Ranks
    px: int
    """Side of the first images that will come."""
    whole_gradient: bool = False
    """Whether something looks at the whole gradient before the optimiser steps: clipping, a loss scale."""


class Strategy:
    """One rank's: there is nobody to agree with. Others replace what they do otherwise."""

    replicates = False
    """Whether each rank has weights of its own."""

    def wrap(self, network: Network) -> Network:
        """The network for training; `network` is the model, compiled perhaps."""
        return network

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Around the forward and backward of each micro-batch of a step."""
        return nullcontext()

    def update(self, step_optimizer: Callable[[], None]) -> None:
        """After the backward of a step: move the weights."""
        step_optimizer()

    def settle(self) -> None:
        """Before weights are averaged: wait for what still reads them."""

    def state(self) -> dict[str, Any]:
        """What it remembers, the same on every rank, for a checkpoint."""
        return {}

    def restore(self, state: dict[str, Any], steps_done: int) -> None:
        """Go on after `steps_done` steps with weights that were just put back."""


def require_strategy(name: str) -> None:
    """A misspelt name is an error that names the nearest."""
    plugin.require(__name__, name)


def build_strategy(parts: Parts) -> Strategy:
    require_strategy(parts.spec.name)
    if not parts.ranks.many:
        return Strategy()
    strategy: Strategy = plugin.load(__name__, parts.spec.name).build(parts)
    return strategy
