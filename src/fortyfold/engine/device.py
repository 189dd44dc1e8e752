"""The device, and the way of a batch to it. All that knows CUDA from CPU is here."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from fortyfold.data.cores import available_cores
from fortyfold.data.reader import Batch, Reader
from fortyfold.spec.recipe import Data


@dataclass(frozen=True)
class DeviceBatch:
    images: torch.Tensor  # float, normalised, NCHW (in NHWC memory order where the recipe says so)
    labels: torch.Tensor
    weights: torch.Tensor


def choose_device() -> torch.device:
    """The GPU that torch would take, or else the CPU (so would CUDA_VISIBLE_DEVICES= have it)."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return f"cpu, {torch.get_num_threads()} threads"


def default_loader_threads(device: torch.device) -> int:
    """One a core beside a GPU; on the CPU half, since the other half of the work is the model's."""
    return available_cores() if device.type == "cuda" else max(1, available_cores() // 2)


def allocate_pinned(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Host memory that a GPU can copy from while the host goes on."""
    return torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()


def open_reader(data: Data, device: torch.device) -> Reader:
    """What reads images for `device` as the recipe's `data` wants it."""
    threads = data.threads or default_loader_threads(device)
    reader = Reader(threads, data.prefetch)
    return replace(reader, allocate=allocate_pinned) if device.type == "cuda" else reader


class Feeder:
    """Copies batches to the device and turns their bytes into normalised floats there."""

    def __init__(self, device: torch.device, data: Data, channels_last: bool) -> None:
        self._device = device
        self._channels_last = channels_last
        self._mean = (255 * torch.tensor(data.mean)).view(1, 3, 1, 1).to(device)
        self._scale = (1 / (255 * torch.tensor(data.std))).view(1, 3, 1, 1).to(device)

    def __call__(self, batch: Batch) -> DeviceBatch:
        images = self._copy(batch.images_nhwc).permute(0, 3, 1, 2).float()  # still NHWC in memory
        images = images.sub_(self._mean).mul_(self._scale)
        if not self._channels_last:
            images = images.contiguous()
        return DeviceBatch(images, self._copy(batch.labels), self._copy(batch.weights))

    def _copy(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
