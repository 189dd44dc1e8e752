"""One gradient for all: torch's DistributedDataParallel, which sends gradients while backward goes on.

Sums of three or more numbers depend on their order, and that on where in a bucket a gradient lies. DDP lays its buckets
out anew after the first backward, so a resumed run would add otherwise than the run before it. Therefore a rehearsal
comes first, at every start: from the first real step on the layout is always the final one.
"""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # the public name has no type
from torch.nn.parallel import DistributedDataParallel

from fortyfold.parallel.strategies import Network, Parts, Strategy

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


# Buffers are each rank's own: in the checkpoint, and averaged for evaluating. The option's name is about to change.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_KEEP_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}


class AllReduce(Strategy):
    def __init__(self, parts: Parts) -> None:
        self._inner = _Switch(parts.model)
        device = next(parts.model.parameters()).device
        sample = torch.zeros(2, 3, parts.px, parts.px, device=device)
        with _rehearsing(parts.model, device):
            self._inner(sample).sum().backward()
            trained = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]
            unused = any(parts.ranks.gather(any(parameter.grad is None for parameter in trained)))
        self._ddp = DistributedDataParallel(
            self._inner,
            device_ids=[device.index] if device.type == "cuda" else None,
            **_KEEP_BUFFERS,
            gradient_as_bucket_view=True,
            bucket_cap_mb=parts.spec.bucket_mb,
            find_unused_parameters=unused,  # DDP then leaves its buckets as they are
        )
        if parts.spec.compress != "none":
            self._ddp.register_comm_hook(_DTYPES[parts.spec.compress], _send_compressed)
        with _rehearsing(parts.model, device):
            self._ddp(sample).sum().backward()

    def wrap(self, network: Network) -> Network:
        self._inner.call(network)
        return self._ddp

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._ddp.no_sync()


def _send_compressed(dtype: torch.dtype, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of a bucket's gradients, which travel as `dtype`. (torch's own hook for bf16 is for GPUs only.)"""
    gradients = bucket.buffer()
    small = gradients.to(dtype).div_(dist.get_world_size())
    work = dist.all_reduce(small, async_op=True)
    assert work is not None
    arrived: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda future: gradients.copy_(future.value()[0])
    )
    return arrived


class _Switch(torch.nn.Module):
    """Holds the model for DDP, and calls it, or what it was compiled to."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        self._called: list[Network] = [model]  # in a list: a module would become a second child

    def call(self, network: Network) -> None:
        self._called = [network]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self._called[0](images)


@contextmanager
def _rehearsing(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Afterwards gradients, buffers and generators are as they were before."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    for parameter in model.parameters():
        parameter.grad = None


def build(parts: Parts) -> AllReduce:
    return AllReduce(parts)
