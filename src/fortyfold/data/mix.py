"""Mixup and cutmix: what each image of a batch is mixed with, and how much. Only drawn here, done on the device.

Neighbours of the global batch are mixed with each other. Guaranteed: the draws depend on (seed, epoch) and the
batch's number or the sample only, so ranks that share a batch in any way make the same images of it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fortyfold.data.augment import MIX, MIX_SHARE, Draws, uniforms
from fortyfold.data.decode import Boxes
from fortyfold.data.order import Hashes, Ids, hash_ids
from fortyfold.spec.recipe import Augment

Shares = NDArray[np.float32]


@dataclass(frozen=True)
class Mix:
    """A row an image of the batch. An image keeps `share` of itself and of its label."""

    partners: Ids  # rows of the batch, whose last rows may be there as partners only
    shares: Shares
    boxes: Boxes  # cutmix: taken from the partner (left, top, right, bottom); all 0: blended, or left alone

    def sparing(self, unreadable: NDArray[np.bool_]) -> "Mix":
        """Without the pairs of which one is unreadable."""
        spared = unreadable[: len(self.partners)] | unreadable[self.partners]
        return Mix(
            self.partners,
            np.where(spared, np.float32(1), self.shares),
            np.where(spared[:, None], 0, self.boxes),
        )


def draw_mix(
    augment: Augment, keys: Ids, own: slice, width: int, height: int, seed: int, epoch: int, batch: int
) -> tuple[Mix, Ids] | None:
    """How a rank's share `own` of the global batch `keys` is mixed; None when no image of it is.

    Also gives the places outside the share (two at most) whose images are needed as partners, as its last rows.
    """
    places = np.arange(own.start, own.stop)
    partners = np.where(places ^ 1 < len(keys), places ^ 1, places)
    drawn_by = {
        "batch": np.full(len(places), batch),
        "pair": keys[np.minimum(places, partners)],
        "image": keys[places],
    }[augment.mix_each]
    distinct, which = np.unique(drawn_by, return_inverse=True)
    shares, boxes = _draw(augment, distinct, width, height, seed, epoch)
    shares, boxes = shares[which], boxes[which]
    alone = partners == places
    shares[alone], boxes[alone] = 1, 0
    if (shares == 1).all():
        return None
    outside = np.setdiff1d(partners, places)
    rows = np.where(np.isin(partners, places), partners - own.start, len(places) + np.searchsorted(outside, partners))
    return Mix(rows, shares, boxes), outside


def _draw(augment: Augment, keys: Ids, width: int, height: int, seed: int, epoch: int) -> tuple[Shares, Boxes]:
    draws = uniforms(keys, seed, epoch, MIX, 4)
    mixed = draws[:, 0] < augment.mix_share
    either = augment.mixup > 0 and augment.cutmix > 0
    cut = draws[:, 1] < augment.cutmix_share if either else np.full(len(keys), augment.cutmix > 0)
    hashes = hash_ids(keys, seed, epoch, MIX_SHARE)
    betas = _draw_betas(hashes, np.where(cut, augment.cutmix, augment.mixup))
    shares = np.where(mixed, betas, np.float32(1))
    boxes = np.where(cut[:, None], _draw_boxes(shares, draws[:, 2:], width, height), 0)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    shares = np.where(cut, 1 - areas / (width * height), shares).astype(np.float32)
    return shares, np.where(areas[:, None] > 0, boxes, 0)


def _draw_betas(hashes: Hashes, parameters: Draws) -> Shares:
    """Beta(a, a), each from a hash of its own.

    By RandomState, whose stream NumPy keeps the same in every release (NEP 19); that of its Generator may change.
    """
    random = np.random.RandomState(0)
    words = np.stack([hashes & np.uint64(0xFFFFFFFF), hashes >> np.uint64(32)], axis=1).astype(np.int64)
    shares = np.empty(len(hashes), np.float32)
    for row, parameter in enumerate(parameters.tolist()):
        random.seed(words[row])
        shares[row] = random.beta(parameter, parameter)
    return shares


def _draw_boxes(shares: Shares, draws: Draws, width: int, height: int) -> Boxes:
    """Boxes of 1 - share of the area with a centre anywhere, cut off at the edges."""
    limits = np.array([width, height])
    sides = (limits * np.sqrt(1 - shares.astype(np.float64))[:, None]).astype(np.int64)
    centres = (draws * limits).astype(np.int64)
    corners = centres - sides // 2
    return np.concatenate([np.clip(corners, 0, limits), np.clip(corners + sides, 0, limits)], axis=1)
