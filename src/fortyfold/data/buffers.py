"""Memory for batches, used again when nobody holds the batch any more, nor any part of it.

A batch of 256 images at 224 px is 38 MB, which the system would map and clear anew each time: a twentieth of the
loader's time, some of it with the interpreter's lock held.
"""

import weakref

import numpy as np
from numpy.typing import NDArray

_MOST_FREE = 4  # beyond those in use; batches are seldom of more than two sizes


class Buffers:
    """Call it with a shape for an array of bytes whose contents do not matter. Any thread may give memory back."""

    def __init__(self) -> None:
        self._free: dict[int, NDArray[np.uint8]] = {}  # by their ids; only operations that the interpreter does at once

    def __call__(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        num_bytes = int(np.prod(shape))
        owner = self._take(num_bytes)
        # Not owner[:num_bytes]: NumPy lets parts of an array hold on to its owner only, past the array itself.
        array = np.frombuffer(owner.data, np.uint8, num_bytes)
        weakref.finalize(array, self._give_back, owner).atexit = False
        return array.reshape(shape)

    def _take(self, num_bytes: int) -> NDArray[np.uint8]:
        """One that fits without waste: batches of an epoch may differ by an image."""
        for key, owner in list(self._free.items()):
            if num_bytes <= len(owner) <= num_bytes + num_bytes // 4 and self._free.pop(key, None) is not None:
                return owner
        return np.empty(num_bytes, np.uint8)

    def _give_back(self, owner: NDArray[np.uint8]) -> None:
        self._free[id(owner)] = owner
        for key in list(self._free)[:-_MOST_FREE]:
            self._free.pop(key, None)
