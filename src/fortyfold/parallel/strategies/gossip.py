"""Ranks mix their weights with a few others' at every step (parallel/gossip.py)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fortyfold.parallel.gossip import Gossip
from fortyfold.parallel.strategies import Parts, Strategy


class Mixing(Strategy):
    replicates = True

    def __init__(self, parts: Parts) -> None:
        spec = parts.spec
        self._gossip = Gossip(
            parts.model,
            parts.optimizer,
            spec.topology,
            in_backward=not parts.whole_gradient,
            bucket_mb=spec.bucket_mb,
            ranks=parts.ranks,
        )

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._gossip.accumulating()

    def update(self, step_optimizer: Callable[[], None]) -> None:
        self._gossip.step(step_optimizer)

    def settle(self) -> None:
        self._gossip.settle()

    def restore(self, state: dict[str, Any], steps_done: int) -> None:
        self._gossip.load_state_dict({"steps_done": steps_done})


def build(parts: Parts) -> Mixing:
    return Mixing(parts)
