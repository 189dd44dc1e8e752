"""Turning images upright: EXIF orientations, and boxes that follow them.

A turn is three bits, as in native/jpeg.h: transpose first (4), then mirror the columns (1) and the rows (2).
"""

import numpy as np
from numpy.typing import NDArray

MIRROR_COLUMNS, MIRROR_ROWS, TRANSPOSE = 1, 2, 4

Turns = NDArray[np.uint8]
_OF_ORIENTATION = np.array([0, 0, 1, 3, 2, 4, 5, 7, 6], np.uint8)  # by EXIF's number, 1…8


def upright_turns(orientations: NDArray[np.int64]) -> Turns:
    """What turns images with these EXIF orientations upright."""
    return _OF_ORIENTATION[orientations]


def turned_sizes(sizes: NDArray[np.int64], turns: Turns) -> NDArray[np.int64]:
    """(width, height) after the turn."""
    return np.where((turns & TRANSPOSE != 0)[:, None], sizes[:, ::-1], sizes)


def stored_boxes(boxes: NDArray[np.int64], sizes: NDArray[np.int64], turns: Turns) -> NDArray[np.int64]:
    """Boxes on turned images (of the turned `sizes`), on the images as they are stored."""
    left, top, right, bottom = boxes.T
    width, height = sizes.T
    columns, rows = turns & MIRROR_COLUMNS != 0, turns & MIRROR_ROWS != 0
    left, right = np.where(columns, width - right, left), np.where(columns, width - left, right)
    top, bottom = np.where(rows, height - bottom, top), np.where(rows, height - top, bottom)
    upright = np.stack([left, top, right, bottom], axis=1)
    return np.where((turns & TRANSPOSE != 0)[:, None], upright[:, [1, 0, 3, 2]], upright)
