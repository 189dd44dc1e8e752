"""What a batch shall hold: which samples, how each is cropped once its size is known, and how they are mixed.

Nothing is read here. Guaranteed: order, crops, substitutes and mixing depend on (seed, epoch, sample id or step)
only. The ranks' shares of a batch are cut from the same global batch, whatever their number.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fortyfold.data import augment, order
from fortyfold.data.blocks import GROUP_IMAGES, block_sequence, mix_groups, stretches
from fortyfold.data.changes import Changes, Colour, draw_changes
from fortyfold.data.decode import Boxes, Sizes
from fortyfold.data.index import Index
from fortyfold.data.mix import Mix, draw_mix
from fortyfold.data.order import Ids
from fortyfold.data.places import Places
from fortyfold.spec.errors import UserError
from fortyfold.spec.recipe import Augment
from fortyfold.spec.timeline import Timeline
from fortyfold.spec.world import World

_SUBSTITUTES = 8  # other images tried in place of an unreadable one


@dataclass(frozen=True)
class Request:
    """One batch of one rank."""

    index: Index
    ids: Ids  # of the rank's share; behind them, images that are there as partners of a mix only
    keys: Ids  # by which all draws about them are made: the ids, or others where images are repeated
    width: int
    height: int
    crops: Callable[[Ids, Sizes], Boxes]  # by keys
    flips: NDArray[np.bool_]
    substitutes: NDArray[np.int64]  # a row a sample: the ids to try in its place
    fetch: Callable[[], Places]  # what is worth reading early
    changes: Callable[[], Changes] | None = None  # what is done to the pixels after the crop
    mix: Mix | None = None

    @property
    def num_own(self) -> int:
        """Images of the rank's share."""
        return len(self.ids) if self.mix is None else len(self.mix.partners)


@dataclass(frozen=True)
class BatchShape:
    """A step's batch over all ranks."""

    num_batches: int  # in its epoch
    global_batch: int
    px: int
    min_scale: float


def require_shards(shuffle: str, indexes: Sequence[Index]) -> None:
    """Blocks are stretches of shards."""
    for index in indexes:
        if shuffle == "block" and index.shards is None:
            raise UserError(f'data.shuffle = "block" needs shards, and {index.folder} has none; see data shard')


class Sampler:
    """Draws training batches. Any batch of any epoch can be asked for at once."""

    def __init__(
        self,
        seed: int,
        tail: str = "keep",
        flip: bool = True,
        shuffle: str = "global",
        world: World | None = None,
        augment: Augment | None = None,
        mean: Colour = (0.485, 0.456, 0.406),
    ) -> None:
        self._seed, self._tail, self._flip, self._shuffle = seed, tail, flip, shuffle
        self._world, self._augment, self._mean = world or World(), augment or Augment(), mean
        self._sequences: dict[int, tuple[Ids, Ids]] = {}  # of the last epochs: as read, as used

    def ids(self, index: Index, epoch: int, batch: int, shape: BatchShape) -> Ids:
        """The samples of a global batch."""
        return self._cut(self._epoch(index, epoch)[1], batch, shape) % len(index)

    def num_places(self, index: Index, batch: int, shape: BatchShape) -> int:
        """How many samples a global batch has."""
        part = order.batch_part(len(index), batch, shape.num_batches, shape.global_batch, self._tail)
        return len(range(part.start, part.stop))

    def request(self, index: Index, epoch: int, batch: int, shape: BatchShape) -> Request:
        """This rank's share of a batch."""
        sequence, used = self._epoch(index, epoch)
        keys = self._cut(used, batch, shape)
        own = order.cut(len(keys), self._world.rank, self._world.size)
        mix, keys = self._mix(keys, own, epoch, batch, shape)
        ids = keys % len(index)
        draws = augment.uniforms(keys, self._seed, epoch, augment.SUBSTITUTE, _SUBSTITUTES)
        return Request(
            index=index,
            ids=ids,
            keys=keys,
            width=shape.px,
            height=shape.px,
            crops=lambda keys, sizes: augment.random_crops(keys, sizes, self._seed, epoch, shape.min_scale),
            flips=augment.flips(keys, self._seed, epoch) if self._flip else np.zeros(len(keys), bool),
            substitutes=(draws * len(index)).astype(np.int64),
            fetch=lambda: self._fetched(index, sequence, batch, shape, ids),
            changes=self._changes(keys, epoch, shape) if self._augment.changes_pixels else None,
            mix=mix,
        )

    def _changes(self, keys: Ids, epoch: int, shape: BatchShape) -> Callable[[], Changes]:
        return lambda: draw_changes(self._augment, self._mean, keys, shape.px, shape.px, self._seed, epoch)

    def _mix(self, keys: Ids, own: slice, epoch: int, batch: int, shape: BatchShape) -> tuple[Mix | None, Ids]:
        """The mix of the rank's share, and its keys with those that only the mix needs."""
        last = self._augment.mix_epochs
        if not self._augment.mixes or (last is not None and epoch >= last):
            return None, keys[own]
        drawn = draw_mix(self._augment, keys, own, shape.px, shape.px, self._seed, epoch, batch)
        return (drawn[0], np.concatenate([keys[own], keys[drawn[1]]])) if drawn else (None, keys[own])

    def _cut(self, used: Ids, batch: int, shape: BatchShape) -> Ids:
        """The keys of a global batch."""
        how = self._tail, self._augment.repeats
        return order.batch_keys(used, batch, shape.num_batches, shape.global_batch, *how)

    def _epoch(self, index: Index, epoch: int) -> tuple[Ids, Ids]:
        if epoch not in self._sequences:
            while len(self._sequences) > 1:
                self._sequences.pop(min(self._sequences))
            self._sequences[epoch] = self._draw(index, epoch)
        return self._sequences[epoch]

    def _draw(self, index: Index, epoch: int) -> tuple[Ids, Ids]:
        if self._shuffle == "global":
            used = order.permutation(len(index), self._seed, epoch)
            return used, used
        require_shards(self._shuffle, [index])
        assert index.shards is not None
        sequence = block_sequence(index.shards.storage_order, self._seed, epoch)
        return sequence, mix_groups(sequence, self._seed, epoch)

    def _fetched(self, index: Index, sequence: Ids, batch: int, shape: BatchShape, ids: Ids) -> Places:
        """The batch's own images; or, in blocks, as much of the next group as the batch uses of this one."""
        if self._shuffle == "global" or index.shards is None:
            return index.places(ids)
        part, repeats = order.cut(len(sequence), batch, shape.num_batches), self._augment.repeats
        start = -(-part.start // repeats) + GROUP_IMAGES if batch else 0
        wanted = sequence[start : -(-part.stop // repeats) + GROUP_IMAGES]
        return stretches(index.shards, wanted) if len(wanted) else index.places(wanted)


def train_requests(
    sampler: Sampler, indexes: Sequence[Index], timeline: Timeline, first_step: int = 0
) -> Iterator[Request]:
    """The batches of steps `first_step`… to the end of the run; `indexes` has the data of each phase."""
    for step in range(first_step, timeline.num_steps):
        position = timeline.at(step)
        index = indexes[position.stretch.phase]
        yield sampler.request(index, position.epoch, position.step_in_epoch, shape_at(timeline, step))


def shape_at(timeline: Timeline, step: int) -> BatchShape:
    stretch = timeline.at(step).stretch
    return BatchShape(stretch.steps_per_epoch, stretch.global_batch, stretch.px, stretch.min_scale)


def eval_requests(
    index: Index, px: int, crop_ratio: float, rank_batch: int, world: World | None = None
) -> Iterator[Request]:
    """Every image once, in order, centre-cropped; with several ranks, this one's share."""
    for ids in _rank_batches(np.arange(len(index)), rank_batch, world or World()):
        yield _eval_request(index, ids, px, px, partial(augment.centre_crops, crop_ratio=crop_ratio))


def rectangular_requests(
    index: Index, sizes: Sizes, px: int, crop_ratio: float, global_batch: int, world: World | None = None
) -> Iterator[Request]:
    """Every image once, sorted by aspect ratio, each global batch cropped to its own mean ratio; shorter side `px`.
    With several ranks, this one's share of each batch: an image's rectangle does not depend on their number."""
    by_ratio = np.argsort(sizes[:, 0] / sizes[:, 1], kind="stable")
    for batch in _rank_batches(by_ratio, global_batch, World()):
        ids = batch[order.cut(len(batch), world.rank, world.size)] if world else batch
        width, height = augment.rectangle(sizes[batch], px)
        crops = partial(augment.rectangular_crops, width=width, height=height, px=px, crop_ratio=crop_ratio)
        if len(ids):
            yield _eval_request(index, ids, width, height, crops)


def fewest_eval_batches(num_samples: int, rank_batch: int, world: World) -> int:
    """How many batches every rank has; some have one more."""
    return -(-(num_samples // world.size) // rank_batch)


def _rank_batches(ids: Ids, rank_batch: int, world: World) -> Iterator[Ids]:
    share = ids[order.cut(len(ids), world.rank, world.size)]
    num_batches = -(-len(share) // rank_batch)
    for batch in range(num_batches):
        yield share[order.cut(len(share), batch, num_batches)]


def _eval_request(index: Index, ids: Ids, width: int, height: int, crops: Callable[[Sizes], Boxes]) -> Request:
    """An unreadable image is left out, not replaced."""
    nothing = np.empty((len(ids), 0), np.int64)
    return Request(
        index=index,
        ids=ids,
        keys=ids,
        width=width,
        height=height,
        crops=lambda _, sizes: crops(sizes),
        flips=np.zeros(len(ids), bool),
        substitutes=nothing,
        fetch=lambda: index.places(ids),
    )
