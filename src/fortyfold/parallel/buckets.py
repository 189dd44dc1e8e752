"""Parameters in buckets: stretches of memory that travel as one message. A parameter becomes a view into its bucket,
in the memory order it had, so nothing is copied before a message or after it.

Bucket by bucket, an optimiser can step a part of its parameters: `Part` has its class, settings and state.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch

_ALIGNED_BYTES = 256


class Bucket:
    """`flat` is the parameters' memory: what changes the one changes the others."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        first = parameters[0]
        starts = [0, *accumulate(_aligned(parameter) for parameter in parameters)]
        self.flat = torch.zeros(starts.pop(), dtype=first.dtype, device=first.device)
        for parameter, start in zip(parameters, starts, strict=True):
            view = self.flat.as_strided(parameter.size(), _dense_strides(parameter), start)
            view.copy_(parameter.detach())
            parameter.data = view


def _aligned(parameter: torch.Tensor) -> int:
    """Elements that it takes up: kernels want its memory to begin where a fresh tensor's would."""
    step = _ALIGNED_BYTES // parameter.element_size()
    return -(-parameter.numel() // step) * step


def _dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Those that it has, where its elements lie side by side (channels_last, say); else the usual ones."""
    dense = torch.empty_like(parameter, device="meta")  # keeps the order of any tensor without gaps
    return dense.stride()


def make_buckets(parameters: Iterable[torch.nn.Parameter], bucket_bytes: float) -> list[Bucket]:
    """Neighbours together, of one type and device, up to `bucket_bytes` (a larger parameter is by itself)."""
    buckets: list[list[torch.nn.Parameter]] = []
    for parameter in parameters:
        last = buckets[-1] if buckets else []
        alike = bool(last) and (last[0].dtype, last[0].device) == (parameter.dtype, parameter.device)
        if alike and sum(each.nbytes for each in last) + parameter.nbytes <= bucket_bytes:
            last.append(parameter)
        else:
            buckets.append([parameter])
    return [Bucket(parameters) for parameters in buckets]


class Part:
    """Steps some parameters of an optimiser that treats each by itself, as the whole one would."""

    def __init__(self, whole: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._whole = whole
        self._wanted = {id(parameter) for parameter in parameters}
        self._part: torch.optim.Optimizer = object.__new__(type(whole))
        # All but `step`, which a learning-rate schedule may have replaced by one bound to the whole optimiser.
        self._part.__dict__.update({name: value for name, value in vars(whole).items() if name != "step"})

    def step(self) -> None:
        self._part.state = self._whole.state  # another object after a load_state_dict
        self._part.param_groups = [dict(group, params=self._own(group)) for group in self._whole.param_groups]
        self._part.step()

    def settle(self) -> None:
        """After every part has stepped: what a step keeps in its groups (a counter, say) is the whole one's, too."""
        for group, own in zip(self._whole.param_groups, self._part.param_groups, strict=True):
            group.update({name: value for name, value in own.items() if name != "params"})

    def _own(self, group: dict[str, Any]) -> list[torch.nn.Parameter]:
        return [parameter for parameter in group["params"] if id(parameter) in self._wanted]
