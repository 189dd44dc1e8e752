"""The mean of all ranks' networks, for evaluating and saving; training goes on with what each rank had."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fortyfold.parallel.ranks import Ranks


@contextmanager
def averaged(models: Sequence[torch.nn.Module], ranks: Ranks, *, parameters: bool = True) -> Iterator[None]:
    """Inside, floating parameters and buffers are their means over the ranks; afterwards as before, bit for bit.

    Costs a copy of them while it lasts. Without `parameters` only buffers (statistics of normalisation layers) differ.
    """
    if not ranks.many:
        yield
        return
    tensors = [tensor for model in models for tensor in _floating(model, parameters)]
    before = [tensor.clone() for tensor in tensors]
    try:
        ranks.mean(tensors)
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)


def _floating(model: torch.nn.Module, parameters: bool) -> Iterator[torch.Tensor]:
    found = [*(model.parameters() if parameters else ()), *model.buffers()]
    yield from (tensor.detach() for tensor in found if tensor.is_floating_point())


@torch.no_grad()
def distance(model: torch.nn.Module, ranks: Ranks) -> float:
    """How far apart the ranks' weights are: the root mean square, over ranks, of the distance to their mean, as a share
    of the mean's length."""
    own = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).float()
    mean = own.clone()
    ranks.mean([mean])
    apart = ranks.sum((own - mean).double().square().sum())
    length = mean.double().square().sum()
    return float((apart / ranks.world.size / length.clamp_min(1e-300)).sqrt())
