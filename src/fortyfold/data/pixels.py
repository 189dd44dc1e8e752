"""Does to a batch's pixels what data/changes.py drew: uint8 NHWC in, changed in place.

Guaranteed: an image's pixels depend on its own row only, not on the number of threads.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fortyfold.data.changes import Changes, Colour
from fortyfold.data.order import random_words


def change_pixels(images_nhwc: NDArray[np.uint8], changes: Changes, num_threads: int) -> None:
    """Operations first, then erasing."""
    with ThreadPoolExecutor(num_threads, thread_name_prefix="pixels") as pool:
        if any(changes.steps):
            from fortyfold.data.operations import operate  # needs torchvision, which others need not pay for

            list(pool.map(operate, images_nhwc, changes.steps))
        if changes.erased.any():
            list(pool.map(partial(_erase, fill=changes.fill), images_nhwc, changes.erased, changes.noise))


def _erase(image: NDArray[np.uint8], box: NDArray[np.int64], noise: np.uint64, fill: Colour | None) -> None:
    left, top, right, bottom = box.tolist()
    erased = image[top:bottom, left:right]
    if fill is not None:
        erased[:] = np.rint(np.array(fill) * 255).astype(np.uint8)
    elif erased.size:
        words = random_words(np.array([noise]), -(-erased.size // 8))[0]
        erased[:] = words.astype("<u8").view(np.uint8)[: erased.size].reshape(erased.shape)
