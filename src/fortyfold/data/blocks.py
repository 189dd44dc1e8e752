"""shuffle = "block": an order that reads a network disk in long stretches.

Shards keep images in a random order already. An epoch takes blocks of neighbours in random order and mixes the
images of GROUP_BLOCKS such blocks with each other. A pure function of (seed, epoch, where the images lie).
"""

import hashlib

import numpy as np

from fortyfold.data.index import Index, Shards
from fortyfold.data.order import Ids, hash_ids
from fortyfold.data.places import Places

BLOCK_IMAGES = 64  # about 7 MB of ImageNet: long enough for any disk
GROUP_BLOCKS = 64
GROUP_IMAGES = BLOCK_IMAGES * GROUP_BLOCKS
_NEIGHBOUR_BYTES = 8192  # between two neighbours lie a label and some tar headers
_BLOCKS, _WITHIN = 11, 12  # purposes of the hashes


def block_sequence(storage_order: Ids, seed: int, epoch: int) -> Ids:
    """The samples as they are read: whole blocks in random order."""
    num_blocks = -(-len(storage_order) // BLOCK_IMAGES)
    ranks = hash_ids(np.arange(num_blocks), seed, epoch, _BLOCKS)
    block_of = np.arange(len(storage_order)) // BLOCK_IMAGES
    return storage_order[np.argsort(ranks[block_of], kind="stable")]


def mix_groups(sequence: Ids, seed: int, epoch: int) -> Ids:
    """The samples as they are used: those of each group mixed."""
    groups = np.arange(len(sequence)) // GROUP_IMAGES
    return sequence[np.lexsort((hash_ids(sequence, seed, epoch, _WITHIN), groups))]


def stretches(shards: Shards, samples: Ids) -> Places:
    """What to read to have these `samples` (neighbours in runs): few long stretches instead of many images."""
    places = shards.places[samples]
    gaps = places.offsets[1:] - (places.offsets[:-1] + places.lengths[:-1])
    starts = np.append(True, (np.diff(places.which) != 0) | (gaps < 0) | (gaps > _NEIGHBOUR_BYTES))
    firsts = np.flatnonzero(starts)
    lasts = np.append(firsts[1:], len(samples)) - 1
    ends = places.offsets[lasts] + places.lengths[lasts]
    return Places(places.files, places.which[firsts], places.offsets[firsts], ends - places.offsets[firsts])


def storage_digest(index: Index) -> str | None:
    """Tells whether two sharded splits keep the same samples in the same order; None without shards."""
    if index.shards is None:
        return None
    return hashlib.sha256(index.shards.storage_order.astype("<i8").tobytes()).hexdigest()[:16]
