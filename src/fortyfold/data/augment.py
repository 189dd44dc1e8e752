"""How a sample is cropped and flipped: pure functions of (seed, epoch, sample id) and of the image's size.

Boxes are whole pixels (left, top, right, bottom). All functions take many images at once.
"""

import numpy as np
from numpy.typing import NDArray

from fortyfold.data.decode import Boxes, Sizes
from fortyfold.data.order import Ids, hash_ids, random_words

Draws = NDArray[np.float64]

CROP, FLIP, SUBSTITUTE, MIX, MIX_SHARE, CHANGE, JITTER, ERASE, NOISE = range(1, 10)
"""Purposes: what a random number is drawn for. (data/blocks.py has 11 and 12.)"""
_TRIES = 10
_MIN_RATIO, _MAX_RATIO = 3 / 4, 4 / 3


def uniforms(ids: Ids, seed: int, epoch: int, purpose: int, count: int) -> Draws:
    """`count` numbers in [0, 1) for each id."""
    words = random_words(hash_ids(ids, seed, epoch, purpose), count)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def flips(ids: Ids, seed: int, epoch: int) -> NDArray[np.bool_]:
    """Which images are mirrored: half of them."""
    return uniforms(ids, seed, epoch, FLIP, 1)[:, 0] < 0.5


def random_crops(ids: Ids, sizes: Sizes, seed: int, epoch: int, min_scale: float) -> Boxes:
    """Boxes of `min_scale`…1 of the area with sides in 3:4…4:3, ten tries, then the largest centred one.

    The distribution is that of torchvision's RandomResizedCrop.
    """
    draws = uniforms(ids, seed, epoch, CROP, 4 * _TRIES).reshape(len(ids), _TRIES, 4)
    limits = sizes[:, None, :].astype(np.float64)
    area = limits.prod(axis=2) * (min_scale + (1 - min_scale) * draws[..., 0])
    ratio = np.exp(np.log(_MIN_RATIO) + (np.log(_MAX_RATIO) - np.log(_MIN_RATIO)) * draws[..., 1])
    sides = np.rint(np.sqrt(np.stack([area * ratio, area / ratio], axis=2)))  # n × tries × (width, height)
    fits = ((sides >= 1) & (sides <= limits)).all(axis=2)
    chosen = (np.arange(len(ids)), fits.argmax(axis=1))  # the first that fits
    side = np.where(fits.any(axis=1)[:, None], sides[chosen], _largest_allowed(sizes))
    free = sizes - side
    corner = np.where(fits.any(axis=1)[:, None], np.floor(draws[chosen][:, 2:] * (free + 1)), np.floor(free / 2))
    return np.concatenate([corner, corner + side], axis=1).astype(np.int64)


def centre_crops(sizes: Sizes, crop_ratio: float) -> Boxes:
    """The centred square whose side is `crop_ratio` of the shorter side."""
    side = np.maximum(1, np.rint(sizes.min(axis=1) * crop_ratio)).astype(np.int64)[:, None]
    corner = (sizes - side) // 2
    return np.concatenate([corner, corner + side], axis=1)


def rectangle(sizes: Sizes, px: int) -> tuple[int, int]:
    """Width and height for a batch of images of these sizes: the shorter `px`, the longer by their mean ratio.

    The longer is a multiple of 8 and at most twice the shorter: an odd panorama shall not blow up a batch.
    """
    ratio = float(np.clip((sizes[:, 0] / sizes[:, 1]).mean(), 0.5, 2.0))
    longer = max(px, round(px * max(ratio, 1 / ratio) / 8) * 8)
    return (longer, px) if ratio >= 1 else (px, longer)


def rectangular_crops(sizes: Sizes, width: int, height: int, px: int, crop_ratio: float) -> Boxes:
    """Centred boxes of the shape width × height, at the scale at which the shorter side would be px / crop_ratio.

    Where an image is too narrow for that, the largest box of the shape.
    """
    shape = np.array([width, height], np.float64)
    scale = sizes.min(axis=1) * crop_ratio / px
    scale = np.minimum(scale, (sizes / shape).min(axis=1))
    sides = np.clip(np.rint(shape * scale[:, None]), 1, sizes).astype(np.int64)
    corner = (sizes - sides) // 2
    return np.concatenate([corner, corner + sides], axis=1)


def _largest_allowed(sizes: Sizes) -> Draws:
    width, height = sizes.astype(np.float64).T
    return np.stack(
        [
            np.maximum(1, np.minimum(width, np.rint(height * _MAX_RATIO))),
            np.maximum(1, np.minimum(height, np.rint(width / _MIN_RATIO))),
        ],
        axis=1,
    )
