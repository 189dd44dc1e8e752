"""Mixup and cutmix on the device. What is mixed with what was decided on the host (data/mix.py)."""

import torch


def mix_images(images: torch.Tensor, partners: torch.Tensor, shares: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """The first len(partners) images, each blended with its partner, or with the partner's box in its place."""
    own, other = images[: len(partners)], images[partners]
    left, top, right, bottom = (side.view(-1, 1, 1, 1) for side in boxes.unbind(1))
    columns = torch.arange(images.shape[3], device=images.device).view(1, 1, 1, -1)
    rows = torch.arange(images.shape[2], device=images.device).view(1, 1, -1, 1)
    pasted = (columns >= left) & (columns < right) & (rows >= top) & (rows < bottom)
    blended = torch.lerp(other, own, torch.where(right > left, 1.0, shares.view(-1, 1, 1, 1)))
    return torch.where(pasted, other, blended)
