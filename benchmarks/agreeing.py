"""The ways for ranks to agree that comm.py compares. Each takes a network and gives a function that takes one step.

The optimiser is the same everywhere: SGD with momentum, in one pass over the memory, so that two cores suffice for it.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from fortyfold.parallel import Gossip, LocalSGD

Step = Callable[[], object]
SYNC_EVERY = 8


def sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=1e-6, momentum=0.9, fused=True)


def backward(model: torch.nn.Module) -> None:
    model(torch.ones(1, requires_grad=True)).sum().backward()


def alone(model: torch.nn.Module) -> Step:
    """Nobody agrees with anybody: what the computing takes."""
    return _plain(model, sgd(model.parameters()))


def allreduce(model: torch.nn.Module, in_bf16: bool = False) -> Step:
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if in_bf16:
        ddp.register_comm_hook(None, bf16_hook)
    return _plain(ddp, sgd(model.parameters()))


def bf16_hook(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's own by another name: DDP refuses that name without a GPU, though Gloo adds bf16 well."""
    return default_hooks.bf16_compress_hook(state, bucket)  # type: ignore[arg-type]


def gossip(model: torch.nn.Module, topology: str) -> Step:
    optimizer = sgd(model.parameters())
    return _wrapped(model, optimizer, Gossip(model, optimizer, topology=topology, in_backward=True).step)


def localsgd(model: torch.nn.Module) -> Step:
    optimizer = sgd(model.parameters())
    return _wrapped(model, optimizer, LocalSGD(model, optimizer, sync_every=SYNC_EVERY).step)


def decent(model: torch.nn.Module, topology: str) -> Step:
    """Decent-DP: it makes an optimiser for each bucket, and steps inside backward."""
    from decent_dp.ddp import DecentralizedDataParallel

    def make_optimizer(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        return sgd(parameter for _, parameter in named)

    return partial(backward, DecentralizedDataParallel(model, make_optimizer, topology=topology))


def _plain(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return _wrapped(model, optimizer, optimizer.step)


def _wrapped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, finish: Step) -> Step:
    def step() -> None:
        backward(model)
        finish()
        optimizer.zero_grad()

    return step


METHODS: dict[str, Callable[[torch.nn.Module], Step]] = {
    "alone": alone,
    "allreduce": allreduce,
    "allreduce-bf16": partial(allreduce, in_bf16=True),
    "gossip-exponential": partial(gossip, topology="exponential"),
    "gossip-ring": partial(gossip, topology="ring"),
    "gossip-alternating_exp_ring": partial(gossip, topology="alternating_exp_ring"),
    "gossip-matching": partial(gossip, topology="matching"),
    "gossip-complete": partial(gossip, topology="complete"),
    "localsgd": localsgd,
    "decent-dp-ring": partial(decent, topology="ring"),
    "decent-dp-one-peer-exp": partial(decent, topology="one-peer-exp"),
}


def least_copies(method: str, num_ranks: int) -> float:
    """How often a rank sends the network's size in a step, at least.

    Decent-DP's topologies are pairs, also its ring; a pair that all-reduces sends as much as one that exchanges.
    """
    if method.startswith(("allreduce", "localsgd")):
        share = {"allreduce": 1.0, "allreduce-bf16": 0.5, "localsgd": 1 / SYNC_EVERY}[method]
        return share * 2 * (num_ranks - 1) / num_ranks
    return {"alone": 0, "gossip-ring": 2, "gossip-complete": num_ranks - 1}.get(method, 1)
