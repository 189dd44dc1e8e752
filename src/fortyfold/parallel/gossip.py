"""Decentralised data parallel: each rank has weights of its own and mixes them with a few others' at every step.

A step from x to the next x is W x - update(gradient at x): D-PSGD. Since the gradient is taken at the unmixed x, the
messages with x can travel while it is computed. So before a step begins, its messages are under way; a bucket whose
gradients have all come waits for its messages, mixes, and lets the optimiser step its parameters, while those of later
buckets still travel. Buckets are in the order in which gradients came in the first step. A bucket that has stepped is
sent at once, and has until its turn in the next step to arrive. Only where steps are mostly waiting, that is, where the
network is the bottleneck, all are sent after the last: newer messages would take bandwidth from older ones, which are
waited for sooner (docs/findings.md). Each rank decides that for itself, by its last step: it changes when messages
leave, neither their order nor what is in them.

When the optimiser steps: bucket by bucket inside backward, so that its time is hidden behind messages that are still to
come, if each parameter can be stepped by itself; after backward, all at once, if the step needs the whole gradient
(clipping by its norm, loss scales, optimisers that look at all parameters). Either way the weights are the same, bit
for bit.

Nothing in flight need be saved: the messages are the ranks' weights, and are sent again after a restart.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from fortyfold.parallel.average import averaged
from fortyfold.parallel.buckets import Bucket, Part, make_buckets
from fortyfold.parallel.ranks import BACKSTOP, Ranks, group_ranks
from fortyfold.topologies import Peer, load_topology

MOST_WAITING = 0.5  # of a step, for messages that leave as soon as they can
_EACH_BY_ITSELF = {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta"}


class Gossip:
    """Wraps a network and its optimiser: call `step()` instead of the optimiser's.

    All ranks start with rank 0's weights, or, with `same_start=False`, with those they have: so a checkpoint of each
    rank's weights, its optimiser's and this object's `state_dict` goes on exactly. With one rank nothing is mixed.
    `in_backward` hides the optimiser's own time behind messages; gradients are then gone before `step()` is called, so
    it is not for those who clip or look at them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        topology: str = "exponential",
        *,
        in_backward: bool = False,
        same_start: bool = True,
        bucket_mb: float = 25.0,
        ranks: Ranks | None = None,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._ranks = ranks or group_ranks()
        self._peers = partial(load_topology(topology), self._ranks.world.rank, self._ranks.world)
        self._group = self._meet() if self._ranks.many else None
        self._bucket_bytes = bucket_mb * 2**20
        self._in_backward = in_backward and steps_each_by_itself(optimizer)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if same_start:
            self._ranks.copy_first([*model.parameters(), *model.buffers()])
        self._arrived: list[int] = []  # numbers of parameters, in the order of their gradients in the first step
        self._accumulating = False
        self._known_order = False
        self._steps_done = 0
        self._next = 0  # turn to be taken in this step
        self._waited_seconds, self._step_began = 0.0, time.perf_counter()
        self._sends_early = True
        self._make_turns(list(reversed(range(len(self._parameters)))))
        for number, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, number))

    def _meet(self) -> dist.ProcessGroup:
        """A group for messages. NCCL wants all ranks in its first operation, and some may rest in the first step."""
        group: dist.ProcessGroup = dist.new_group(timeout=BACKSTOP)
        dist.all_reduce(torch.zeros(1, device=next(self._model.parameters()).device), group=group)
        return group

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Around all but the last backward of a step that has several."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @torch.no_grad()
    def step(self, step_optimizer: Callable[[], object] | None = None) -> None:
        """Finish the step: mix and step whatever was not yet, and send. `step_optimizer` takes the optimiser's place;
        it is called only where the optimiser steps after backward."""
        if self._next:
            while self._next < len(self._turns):  # those with parameters that this step left unused
                self._take_turn()
            self._turns[-1].part.settle()
        else:
            for turn in self._turns:
                self._mix(turn)
            (step_optimizer or self._optimizer.step)()
        self._finish()

    def settle(self) -> None:
        """Wait until what is under way has arrived. It stays unmixed; the weights may be replaced for a while."""
        for turn in self._turns:
            turn.wait()

    @contextmanager
    def averaged(self) -> Iterator[torch.nn.Module]:
        """The network with the mean of all ranks' weights and statistics, for evaluating; afterwards as it was."""
        self.settle()
        with averaged([self._model], self._ranks):
            yield self._model

    def state_dict(self) -> dict[str, int]:
        return {"steps_done": self._steps_done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Before the first step."""
        assert not any(turn.messages for turn in self._turns), "messages are under way"
        self._steps_done = state["steps_done"]

    def _on_gradient(self, number: int, parameter: torch.Tensor) -> None:
        if self._accumulating:
            return
        if not self._known_order:
            self._arrived.append(number)
            return
        if not self._in_backward:
            return
        turn = self._turn_of[number]
        if number not in turn.missing:
            raise RuntimeError("a second backward in one step: use `with gossip.accumulating():` for all but the last")
        turn.missing.remove(number)
        while self._next < len(self._turns) and not self._turns[self._next].missing:
            self._take_turn()  # strictly in order, the same on every rank

    @torch.no_grad()
    def _take_turn(self) -> None:
        turn = self._turns[self._next]
        self._next += 1
        self._mix(turn)
        turn.part.step()
        for parameter in turn.bucket.parameters:
            parameter.grad = None
        if self._sends_early:
            turn.launch(self._peers(self._steps_done + 1), self._group)

    def _mix(self, turn: "_Turn") -> None:
        if not turn.sent:  # the first step of all, or after a restart
            turn.launch(self._peers(self._steps_done), self._group)
        began = time.perf_counter()
        turn.wait()
        self._waited_seconds += time.perf_counter() - began
        turn.mix()

    def _finish(self) -> None:
        self._steps_done += 1
        self._optimizer._opt_called = True  # type: ignore[attr-defined] # learning-rate schedules ask for it
        if not self._known_order:
            self._order_by_arrival()
        for turn in self._turns:
            if not turn.sent:
                turn.launch(self._peers(self._steps_done), self._group)
        now = time.perf_counter()
        self._sends_early = self._waited_seconds <= MOST_WAITING * (now - self._step_began)
        self._waited_seconds, self._step_began = 0.0, now
        self._await_gradients()

    def _order_by_arrival(self) -> None:
        """Once, between mixing and sending: buckets as gradients came on rank 0, then those that never came."""
        unused = [number for number in reversed(range(len(self._parameters))) if number not in self._arrived]
        order = self._ranks.from_first(lambda: [*dict.fromkeys(self._arrived), *unused])
        self._known_order = True
        self._make_turns(order)

    def _make_turns(self, order: list[int]) -> None:
        buckets = make_buckets([self._parameters[number] for number in order], self._bucket_bytes)
        self._turns = [_Turn(number, bucket, self._optimizer) for number, bucket in enumerate(buckets)]
        turn_of = {id(parameter): turn for turn in self._turns for parameter in turn.bucket.parameters}
        self._turn_of: list[_Turn] = [turn_of[id(parameter)] for parameter in self._parameters]
        self._await_gradients()

    def _await_gradients(self) -> None:
        """A step begins."""
        for number, turn in enumerate(self._turn_of):
            turn.missing.add(number)
        self._next = 0


class _Turn:
    """A bucket, its part of the optimiser, and its messages."""

    def __init__(self, number: int, bucket: Bucket, optimizer: torch.optim.Optimizer) -> None:
        self._number = number
        self.bucket = bucket
        self.part = Part(optimizer, bucket.parameters)
        self.missing: set[int] = set()  # numbers of parameters whose gradients are still to come
        self.sent = False  # whether its messages for the next mixing are under way, or there
        self.messages: list[dist.Work] = []
        self._received: list[tuple[torch.Tensor, float]] = []
        self._spare: list[torch.Tensor] = []

    def launch(self, peers: list[Peer], group: dist.ProcessGroup | None) -> None:
        """Send the bucket as it is now, which must not change before `wait`; receive beside it."""
        self.sent = True
        while len(self._spare) < len(peers):
            self._spare.append(torch.empty_like(self.bucket.flat))
        self._received = [(buffer, peer.weight) for buffer, peer in zip(self._spare, peers, strict=False)]
        operations = []
        for peer, (buffer, _) in zip(peers, self._received, strict=True):
            operations.append(dist.P2POp(dist.irecv, buffer, peer.receive_from, group, self._number))
            operations.append(dist.P2POp(dist.isend, self.bucket.flat, peer.send_to, group, self._number))
        self.messages = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        for message in self.messages:
            message.wait()
        self.messages = []

    def mix(self) -> None:
        """What has arrived is taken in."""
        assert not self.messages
        self.sent = False
        if self._received:
            self.bucket.flat.mul_(1 - sum(weight for _, weight in self._received))
        for buffer, weight in self._received:
            self.bucket.flat.add_(buffer, alpha=weight)


def steps_each_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a parameter's step depends on nothing but its own gradient and state."""
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim") and kind.__name__ in _EACH_BY_ITSELF
    return known or bool(getattr(kind, "steps_each_by_itself", False))
