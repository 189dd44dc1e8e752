"""Does to a batch's pixels what data/changes.py drew: uint8 NHWC in, changed in place.

Guaranteed: an image's pixels depend on its own row only, not on the number of threads.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from fortyfold.data.changes import Changes, Colour
from fortyfold.data.order import random_words


def change_pixels(images_nhwc: NDArray[np.uint8], changes: Changes, num_threads: int) -> float:
    """Operations first, then erasing; gives the seconds that the threads, together, spent on it."""
    if any(changes.steps):
        from fortyfold.data.operations import operate  # needs torchvision, which others need not pay for

    def change(row: int) -> float:
        started = time.perf_counter()
        if changes.steps[row]:
            operate(images_nhwc[row], changes.steps[row])
        _erase(images_nhwc[row], changes.erased[row], changes.noise[row], changes.fill)
        return time.perf_counter() - started

    with ThreadPoolExecutor(num_threads, thread_name_prefix="pixels") as pool:
        return sum(pool.map(change, range(len(images_nhwc))))


def _erase(image: NDArray[np.uint8], box: NDArray[np.int64], noise: np.uint64, fill: Colour | None) -> None:
    left, top, right, bottom = box.tolist()
    erased = image[top:bottom, left:right]
    if fill is not None:
        erased[:] = np.rint(np.array(fill) * 255).astype(np.uint8)
    elif erased.size:
        words = random_words(np.array([noise]), -(-erased.size // 8))[0]
        erased[:] = words.astype("<u8").view(np.uint8)[: erased.size].reshape(erased.shape)
