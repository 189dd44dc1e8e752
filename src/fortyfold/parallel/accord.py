"""Agreeing on what a single rank notices: a signal, a loss that is not finite, a save that is due.

Each rank puts its word into an exchange that travels while training goes on, and takes the answer out some ticks
later. All ranks do both in the same ticks, so all learn the same thing in the same tick, and nobody ever waits for
an answer that has just been asked for. The ticks between two exchanges follow from the slowest rank's pace, as agreed
in the exchange before, and are about a second long. They grow at most twofold: a pace that was measured while nothing
was done (between an evaluation and the next step, say) must not put the next exchange off for minutes.
"""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fortyfold.parallel.ranks import BACKSTOP, Ranks

PERIOD_SECONDS = 1.0
MOST_TICKS = 1000

Words = list[int]


class Accord:
    """The largest of all ranks' words, each a number; 0 says nothing."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._group = dist.new_group(backend="gloo", timeout=BACKSTOP) if ranks.many else None
        self._under_way: tuple[dist.Work, torch.Tensor] | None = None
        self._ticks, self._due, self._since = 0, 1, time.monotonic()

    def tick(self, words: Sequence[int]) -> Words | None:
        """Once a step (or batch of an evaluation), as often on every rank: what was agreed, if it is time."""
        if not self._ranks.many:
            return list(words)
        self._ticks += 1
        if self._ticks < self._due:
            return None
        agreed = self._take()
        now = time.monotonic()
        pace = (now - self._since) / self._ticks  # seconds a tick
        self._ticks, self._since = 0, now
        if agreed is not None:
            slowest = agreed.pop() / 1e6
            self._due = max(1, min(MOST_TICKS, 2 * self._due, round(PERIOD_SECONDS / max(slowest, 1e-6))))
        self._send([*words, round(pace * 1e6)])
        return agreed

    def now(self, words: Sequence[int]) -> Words:
        """The same at once: everybody waits for everybody."""
        if not self._ranks.many:
            return list(words)
        tensor = torch.tensor(words, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return tensor.tolist()

    def start_over(self) -> None:
        """Something else is ticking now, at a pace of its own; forget what is under way."""
        self._take()
        self._ticks, self._due, self._since = 0, 1, time.monotonic()

    def _send(self, words: Words) -> None:
        tensor = torch.tensor(words, dtype=torch.int64)
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._under_way = work, tensor

    def _take(self) -> Words | None:
        if self._under_way is None:
            return None
        (work, tensor), self._under_way = self._under_way, None
        work.wait()
        return tensor.tolist()
