"""Mixup and cutmix: what each image of a batch is mixed with, and how much."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fortyfold.data.decode import Boxes
from fortyfold.data.order import Ids


@dataclass(frozen=True)
class Mix:
    """A row an image of the batch. An image keeps `share` of itself and of its label."""

    partners: Ids  # rows of the batch, whose last rows may be there as partners only
    shares: NDArray[np.float32]
    boxes: Boxes  # cutmix: taken from the partner (left, top, right, bottom); all 0: blended, or left alone
