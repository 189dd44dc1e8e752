"""Batch normalisation over the global batch instead of each rank's share. torch's own works on GPUs only; on a CPU this
one takes its place, by the same names in the same state."""

from typing import Any

import torch
import torch.distributed as dist

from fortyfold.models.timm_import import timm


def synchronise(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """The same network with the same parameters, its batch normalisation synchronised."""
    converted: torch.nn.Module = timm.layers.convert_sync_batchnorm(model)
    if device.type == "cpu":
        for module in converted.modules():
            if isinstance(module, torch.nn.SyncBatchNorm):
                module.__class__ = _ActOnHost if hasattr(module, "act") else _OnHost  # type: ignore[assignment]
    return converted


class _OnHost(torch.nn.modules.batchnorm._BatchNorm):  # not a SyncBatchNorm, which DDP refuses on a CPU
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return torch.nn.functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        x = input.float()
        dims = [0, *range(2, x.ndim)]
        # Two passes, since E[x²] - E[x]² would cancel. The count is the same for all channels, and constant.
        total = _sum_over_ranks(torch.cat([x.sum(dims), x.new_tensor([x.numel() / x.shape[1]])]))
        count = total[-1].detach()
        centred = x - _over_channels(total[:-1] / count, x)
        variance = _sum_over_ranks(centred.square().sum(dims)) / count
        self._remember(total[:-1].detach() / count, variance.detach(), count)
        scaled = centred * _over_channels((variance + self.eps).rsqrt(), x)
        if self.affine:
            scaled = scaled * _over_channels(self.weight, x) + _over_channels(self.bias, x)
        return scaled.to(input.dtype)

    @torch.no_grad()
    def _remember(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance * (count / (count - 1)), share)


class _ActOnHost(_OnHost):
    """timm's layers with an activation behind them."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        activated: torch.Tensor = self.act(self.drop(super().forward(input)))  # type: ignore[operator]
        return activated


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


def _sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = _Sum.apply(tensor)  # type: ignore[no-untyped-call]
    return total


def _over_channels(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return vector.view(1, -1, *[1] * (like.ndim - 2))
