"""Which sample is used at which step: pure functions of (seed, epoch, sample id), and nothing else.

Neither the number of ranks nor of threads, nor a restart, can change the answer. The randomness is a hash
(the finaliser of SplitMix64, a bijection on 64 bits), not a generator with a state: any step can be asked
for at once, and the numbers stay the same on every machine and with every NumPy.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Hashes = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: Hashes) -> Hashes:
    """SplitMix64's finaliser, elementwise: distinct values stay distinct."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_ids(ids: Ids, *parts: int) -> Hashes:
    """One hash an id, different for each tuple of `parts` (say, seed, epoch, purpose)."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = mix(key * _GOLDEN + np.uint64(part % 2**64) + _GOLDEN)
    return mix(mix(ids.astype(np.uint64)) + key)


def random_words(hashes: Hashes, count: int) -> Hashes:
    """A row of `count` random words for each hash."""
    return mix(hashes[:, None] + np.arange(count, dtype=np.uint64)[None, :] * _GOLDEN)


@lru_cache(maxsize=2)
def permutation(num_samples: int, seed: int, epoch: int) -> Ids:
    """The samples in the order of an epoch, that of their hashes.

    The ids take the place of the hashes' low bits: sorting whole numbers is three times as fast as finding the
    order of a sort, and each id comes out exactly once.
    """
    id_bits = np.uint64((num_samples - 1).bit_length())
    ids = np.arange(num_samples)
    keys = hash_ids(ids, seed, epoch) >> id_bits << id_bits | ids.astype(np.uint64)
    keys.sort()
    order = (keys & ((np.uint64(1) << id_bits) - np.uint64(1))).astype(np.int64)
    order.setflags(write=False)
    return order


def cut(num_items: int, part: int, num_parts: int) -> slice:
    """The `part`-th of `num_parts` contiguous pieces whose sizes differ by at most one."""
    return slice(part * num_items // num_parts, (part + 1) * num_items // num_parts)


def batch_part(num_samples: int, batch: int, num_batches: int, global_batch: int, tail: str) -> slice:
    """Which places of an epoch make one global batch."""
    return cut(num_batches * global_batch if tail == "drop" else num_samples, batch, num_batches)


def batch_keys(used: Ids, batch: int, num_batches: int, global_batch: int, tail: str, repeats: int = 1) -> Ids:
    """The places of one global batch of an epoch that takes the samples in the order `used`, each `repeats` times.

    A place is told by its key, id + repeat × number of samples, and all draws about it are made by that. Within the
    batch first repeats come first, so that neighbours are different images. An epoch ends after as many places as
    there are samples, whatever `repeats` is.
    """
    part = batch_part(len(used), batch, num_batches, global_batch, tail)
    if repeats == 1:
        return used[part]
    places = np.arange(part.start, part.stop)
    places = places[np.argsort(places % repeats, kind="stable")]
    keys: Ids = used[places // repeats] + places % repeats * len(used)
    return keys


def digest(ids: Ids) -> int:
    """32 bits that tell which samples a step used, whatever their order; digests of ranks add up (mod 2³²)."""
    return int(mix(ids.astype(np.uint64) + _GOLDEN).sum(dtype=np.uint64)) & 0xFFFFFFFF
