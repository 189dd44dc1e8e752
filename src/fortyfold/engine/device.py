"""The device, and the way of a batch to it. All that knows CUDA from CPU is here."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fortyfold.data import dali_decode, decode, order
from fortyfold.data.cores import available_cores
from fortyfold.data.disks import is_on_network
from fortyfold.data.reader import Batch, Reader
from fortyfold.engine.mixing import mix_images
from fortyfold.spec.recipe import Data

_FAR_READ_AHEAD = 4  # batches, on a network disk


@dataclass(frozen=True)
class DeviceBatch:
    images: torch.Tensor  # float, normalised, NCHW (in NHWC memory order where the recipe says so)
    labels: torch.Tensor  # numbers; or, of an own data set, a row of shares an image
    weights: torch.Tensor
    others: torch.Tensor | None = None  # of mixed images: the partner's label…
    shares: torch.Tensor | None = None  # …and how much of an image is its own

    def __len__(self) -> int:
        return len(self.weights)

    def cut(self, num_parts: int) -> Iterator["DeviceBatch"]:
        """Micro-batches, whose sizes differ by at most one."""
        for part in range(min(num_parts, len(self))):
            rows = order.cut(len(self), part, min(num_parts, len(self)))
            mixed = (tensor if tensor is None else tensor[rows] for tensor in (self.others, self.shares))
            yield DeviceBatch(self.images[rows], self.labels[rows], self.weights[rows], *mixed)


def choose_device() -> torch.device:
    """The GPU that torch would take, or else the CPU (so would CUDA_VISIBLE_DEVICES= have it)."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return f"cpu, {torch.get_num_threads()} threads"


def default_loader_threads(device: torch.device, ranks_here: int = 1) -> int:
    """One a core beside a GPU; on the CPU half, since the other half of the work is the model's. Several ranks on a
    node share its cores."""
    return max(1, available_cores() // ranks_here // (1 if device.type == "cuda" else 2))


def allocate_pinned(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Host memory that a GPU can copy from while the host goes on."""
    return torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()


def open_reader(data: Data, device: torch.device, folders: Sequence[Path], ranks_here: int = 1) -> Reader:
    """What reads the images in `folders` for `device` as the recipe's `data` wants it, on a node of so many ranks."""
    far = _FAR_READ_AHEAD if any(map(is_on_network, folders)) else 0
    reader = Reader(
        num_threads=data.threads or default_loader_threads(device, ranks_here),
        prefetch=data.prefetch,
        read_ahead=far if data.read_ahead is None else data.read_ahead,
        upright=data.exif_orientation,
        interpolation=data.interpolation,
    )
    if data.backend == "dali":
        reader = replace(reader, decode_crops=_open_dali(reader.num_threads, device).decode_crops)
    return replace(reader, allocate=allocate_pinned) if device.type == "cuda" else reader


def decoder_name(data: Data, device: torch.device) -> str:
    """Who makes the pixels, with versions: a run does not go on with another."""
    return f"dali {dali_decode.version()} on the {device.type}" if data.backend == "dali" else decode.NAME


def _open_dali(num_threads: int, device: torch.device) -> dali_decode.DaliDecoder:
    if device.type == "cuda":
        return dali_decode.DaliDecoder(num_threads, "mixed", device.index)
    return dali_decode.DaliDecoder(num_threads)


Copied = list[torch.Tensor]  # images, labels, weights, and of a mix its partners, shares and boxes


class Feeder:
    """Copies batches to the device and turns their bytes into normalised floats there."""

    def __init__(self, device: torch.device, data: Data, channels_last: bool) -> None:
        self.device = device
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Several streams may be under way: an evaluation begins while training's next batch is being copied.
        self._under_way: dict[int, tuple[Batch, Copied, torch.cuda.Event]] = {}
        self._arriving: list[tuple[Batch, torch.cuda.Event]] = []  # the host's memory, held until it was copied
        self._channels_last = channels_last
        self._mean = (255 * torch.tensor(data.mean)).view(1, 3, 1, 1).to(device)
        self._scale = (1 / (255 * torch.tensor(data.std))).view(1, 3, 1, 1).to(device)

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; to a GPU each one's copy begins while the one before is being used."""
        if self._copy_stream is None:
            yield from batches
            return
        begun: deque[Batch] = deque()
        try:
            for batch in batches:
                self._begin_copy(batch)
                begun.append(batch)
                if len(begun) > 1:
                    yield begun[0]
                    begun.popleft()
            while begun:
                yield begun[0]
                begun.popleft()
        finally:
            for batch in begun:
                self._under_way.pop(id(batch), None)  # nobody came for it

    def __call__(self, batch: Batch) -> DeviceBatch:
        images, labels, weights, *mix = self._arrived(batch) or self._copy(batch)
        images = images.permute(0, 3, 1, 2).float()  # still NHWC in memory
        images = images.sub_(self._mean).mul_(self._scale)
        if not self._channels_last:
            images = images.contiguous()
        if batch.mix is None:
            return DeviceBatch(images, labels, weights)
        partners, shares, boxes = mix
        mixed = mix_images(images, partners, shares, boxes)
        num_images = len(batch)  # the rows beyond were there as partners only
        return DeviceBatch(mixed, labels[:num_images], weights[:num_images], labels[partners], shares)

    def _copy(self, batch: Batch) -> Copied:
        arrays = [batch.labels, batch.weights]
        if batch.mix is not None:
            arrays += [batch.mix.partners, batch.mix.shares, batch.mix.boxes]
        # The images last: a copy from memory that is not pinned may wait for the copies before it.
        small = [torch.from_numpy(array).to(self.device, non_blocking=True) for array in arrays]
        return [torch.from_numpy(batch.images_nhwc).to(self.device, non_blocking=True), *small]

    def _begin_copy(self, batch: Batch) -> None:
        assert self._copy_stream is not None
        with torch.cuda.stream(self._copy_stream):
            copied = self._copy(batch)
        self._under_way[id(batch)] = (batch, copied, self._copy_stream.record_event())

    def _arrived(self, batch: Batch) -> Copied | None:
        """What was copied ahead: the step waits for it, the host does not."""
        if id(batch) not in self._under_way:
            return None
        _, copied, done = self._under_way.pop(id(batch))
        now = torch.cuda.current_stream(self.device)
        now.wait_event(done)
        for tensor in copied:
            tensor.record_stream(now)
        self._arriving = [entry for entry in self._arriving if not entry[1].query()] + [(batch, done)]
        return copied
