"""Ranks step alone and average their weights after every so many steps (parallel/local_sgd.py)."""

from collections.abc import Callable
from typing import Any

from fortyfold.parallel.local_sgd import LocalSGD
from fortyfold.parallel.strategies import Parts, Strategy


class Averaging(Strategy):
    replicates = True

    def __init__(self, parts: Parts) -> None:
        spec = parts.spec
        self._local = LocalSGD(
            parts.model,
            parts.optimizer,
            spec.sync_every,
            together_steps=spec.together_steps,
            outer=spec.outer,
            outer_lr=spec.outer_lr,
            outer_momentum=spec.outer_momentum,
            ranks=parts.ranks,
        )

    def update(self, step_optimizer: Callable[[], None]) -> None:
        step_optimizer()
        self._local.count_step()

    def state(self) -> dict[str, Any]:
        return self._local.state_dict()

    def restore(self, state: dict[str, Any], steps_done: int) -> None:
        self._local.load_state_dict({**state, "steps_done": steps_done})


def build(parts: Parts) -> Averaging:
    return Averaging(parts)
