"""A network of ResNet-50's size that computes nothing: each layer sleeps instead, forward and twice as long backward.

Its parameters, their sizes and the order of their gradients are ResNet-50's: 25.6 million in 54 layers. So four ranks
fit on two cores, and what communication can hide behind is known exactly. Every gradient is 1.
"""

import time
from typing import Any

import torch

STAGES = [(64, 3), (128, 4), (256, 6), (512, 3)]  # width of a bottleneck, number of them


class SleepingResNet(torch.nn.Module):
    """Takes and gives a tensor of one number; one step sleeps for 3 × 54 × `layer_seconds`."""

    def __init__(self, layer_seconds: float) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(SleepingLayer(sizes, layer_seconds) for sizes in layer_sizes()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


class SleepingLayer(torch.nn.Module):
    def __init__(self, sizes: tuple[int, ...], seconds: float) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterList(torch.zeros(size) for size in sizes)
        self._seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Sleep.apply(self._seconds, x, *self.tensors)  # type: ignore[no-untyped-call]
        return y


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, seconds: float, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        time.sleep(seconds)
        ctx.seconds, ctx.sizes = seconds, [parameter.numel() for parameter in parameters]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        time.sleep(2 * ctx.seconds)
        return None, gradients[0], *(torch.ones(size) for size in ctx.sizes)


def layer_sizes() -> list[tuple[int, ...]]:
    """Of each layer's tensors: a convolution with its normalisation's scale and shift, or the classifier's two."""
    convolutions, channels = [(3, 64, 7)], 64  # channels in and out, side of the kernel
    for width, number in STAGES:
        for place in range(number):
            convolutions += [(channels, width, 1), (width, width, 3), (width, 4 * width, 1)]
            if place == 0:
                convolutions.append((channels, 4 * width, 1))
            channels = 4 * width
    return [*((ins * outs * side**2, outs, outs) for ins, outs, side in convolutions), (channels * 1000, 1000)]


def model_bytes() -> int:
    return 4 * sum(map(sum, layer_sizes()))
