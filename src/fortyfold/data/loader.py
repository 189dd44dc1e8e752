"""A split's batches in anybody's training loop: the loader of fortyfold, without the rest of it."""

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from fortyfold.data.changes import Colour
from fortyfold.data.cores import available_cores
from fortyfold.data.index import Index
from fortyfold.data.items import DataSet
from fortyfold.data.own import open_own
from fortyfold.data.reader import Batch, Reader
from fortyfold.data.requests import BatchShape, Sampler, eval_requests, require_shards
from fortyfold.data.splits import open_folder
from fortyfold.spec.errors import UserError
from fortyfold.spec.recipe import Augment
from fortyfold.spec.recipe_file import parse_section
from fortyfold.spec.timeline import num_batches
from fortyfold.spec.world import World


class Loader:
    """Reads a folder with a folder a class, or of shards; or a data set object with a length and items (image, label).

    Of an object, an image is a uint8 H × W × 3 array, a uint8 3 × H × W tensor or a PIL image of any size, a label a
    class number or an array of probabilities. `num_classes` is needed where it has neither `classes` nor `labels` (or
    `targets`). Its items are asked for in several threads at once.

    `classes` names the classes, len() counts the images. `threads` (0: one a core), `prefetch` (batches made
    ahead) and `read_ahead` (batches whose bytes are fetched before that: for network disks) change no pixel.
    """

    def __init__(
        self,
        folder: str | Path | DataSet,
        *,
        num_classes: int | None = None,
        threads: int = 0,
        prefetch: int = 2,
        read_ahead: int = 0,
        exif_orientation: bool = False,
        interpolation: str = "bilinear",
    ) -> None:
        if interpolation not in ("bilinear", "bicubic"):
            raise UserError(f"interpolation = {interpolation!r}: there are 'bilinear' and 'bicubic'")
        self._index = _open(folder, num_classes)
        self._reader = Reader(threads or available_cores(), prefetch, read_ahead, exif_orientation, interpolation)
        self.classes = self._index.classes

    def __len__(self) -> int:
        return len(self._index)

    def epoch(
        self,
        epoch: int,
        *,
        px: int,
        rank_batch: int,
        seed: int = 0,
        min_scale: float = 0.08,
        flip: bool = True,
        tail: str = "keep",
        shuffle: str = "global",
        augment: Augment | Mapping[str, Any] | None = None,
        mean: Colour = (0.485, 0.456, 0.406),
        rank: int = 0,
        world_size: int = 1,
        first_batch: int = 0,
    ) -> Generator[Batch, None, None]:
        """Random crops of every image once, in an order of its own for each (seed, epoch).

        `augment` has the keys of a recipe's section of that name, such as {"policy": "rand", "erase": 0.25}. Starts at
        any batch at once, so that a run can go on in the middle of an epoch.
        """
        if tail not in ("keep", "drop") or shuffle not in ("global", "block"):
            raise UserError(f"tail = {tail!r}, shuffle = {shuffle!r}: there are 'keep', 'drop' and 'global', 'block'")
        world = _world(rank_batch, rank, world_size)
        require_shards(shuffle, [self._index])
        global_batch = rank_batch * world_size
        batches = num_batches(len(self._index), global_batch, tail)
        if not batches:
            raise UserError(f"{len(self._index)} images make no batch of {global_batch}, and tail = 'drop' drops them")
        changes = _parse_augment(augment)
        changes.check_batch(global_batch)
        shape = BatchShape(batches, global_batch, px, min_scale)
        sampler = Sampler(seed, tail, flip, shuffle, world, changes, mean)
        return self._reader.stream(
            sampler.request(self._index, epoch, batch, shape) for batch in range(first_batch, batches)
        )

    def evaluation(
        self, *, px: int, rank_batch: int, crop_ratio: float = 0.875, rank: int = 0, world_size: int = 1
    ) -> Generator[Batch, None, None]:
        """Centre crops of every image once, in order; with several ranks, this one's share."""
        world = _world(rank_batch, rank, world_size)
        return self._reader.stream(eval_requests(self._index, px, crop_ratio, rank_batch, world))


def _open(folder: str | Path | DataSet, num_classes: int | None) -> Index:
    if not isinstance(folder, str | Path):
        return open_own(folder, num_classes=num_classes)
    if num_classes is not None:
        raise UserError(f"num_classes = {num_classes} is for data set objects; a folder's classes are counted")
    return open_folder(Path(folder))


def _parse_augment(augment: Augment | Mapping[str, Any] | None) -> Augment:
    if isinstance(augment, Augment):
        return augment
    if augment is not None and not isinstance(augment, Mapping):
        raise UserError(f"augment is a {type(augment).__name__}; give a dict such as {{'policy': 'rand'}}")
    return parse_section(Augment, augment or {}, source="augment")


def _world(rank_batch: int, rank: int, world_size: int) -> World:
    if rank_batch < 1 or not 0 <= rank < world_size:
        raise UserError(f"rank_batch = {rank_batch}, rank = {rank}, world_size = {world_size}: this cannot be")
    return World(world_size, rank)
