"""The items of somebody's own data set object: (image, label) by number, checked, as Pillow images in RGB.

An image is a uint8 H × W × 3 array, a uint8 3 × H × W torch tensor, or a PIL image; a label is a class number or a
probability for each class. An item that raises is an unreadable image (BadImage), unless its fault may pass
(RunFailed); one of another kind ends all (UserError), since the others will be no better. Any thread may load items,
several the same one, too.
"""

import errno
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fortyfold.data.decode import Headers, Reasons, attempt
from fortyfold.data.order import Ids
from fortyfold.data.pillow_decode import BadImage, describe, orientation
from fortyfold.spec.errors import RunFailed, UserError

Label = int | NDArray[np.float32]
Labels = NDArray[np.int64] | NDArray[np.float32]  # class numbers, or a row of probabilities an image

_ITEM = "an item is (image, label)"
_IMAGE = "an image is a uint8 H × W × 3 array, a uint8 3 × H × W tensor or a PIL image (not normalised)"
_LASTING_FAULTS = (None, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR)  # Pillow's have no number
_LOCKS = [threading.Lock() for _ in range(64)]  # an image has one of them, so that most are loaded side by side


class DataSet(Protocol):
    """What may be given in place of a folder."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Item:
    image: Image.Image
    orientation: int  # by its EXIF data
    label: Label

    @property
    def header(self) -> tuple[int, int, int]:
        """Width, height, EXIF orientation."""
        return self.image.width, self.image.height, self.orientation


@dataclass(frozen=True)
class Items:
    """`name` is what the user knows the data set by."""

    source: DataSet
    name: str
    num_classes: int
    soft: bool  # labels are probabilities

    def load(self, sample: int) -> Item:
        where = f"{self.name}[{sample}]"
        image, label = fetch(self.source, sample, where)
        found = as_label(label, where)
        if isinstance(found, int) == self.soft:
            raise UserError(f"{where} has a label of another kind than the first; all must be alike")
        if isinstance(found, int) and not 0 <= found < self.num_classes:
            raise UserError(f"{where} has the label {found}; there are classes 0 to {self.num_classes - 1}")
        if not isinstance(found, int) and len(found) != self.num_classes:
            raise UserError(f"{where} has {len(found)} probabilities for {self.num_classes} classes")
        return Item(*_load_pixels(as_image(image, where), where), found)

    def blank_labels(self, num_images: int) -> Labels:
        """Of images that are not loaded yet, or cannot be."""
        if self.soft:
            return np.zeros((num_images, self.num_classes), np.float32)
        return np.zeros(num_images, np.int64)

    def read_headers(self, samples: Ids, num_threads: int) -> tuple[Headers, Reasons]:
        """As data/decode.py's, but each whole item is loaded for it."""
        headers = np.ones((len(samples), 3), np.int64)

        def read(row: int) -> None:
            headers[row] = self.load(int(samples[row])).header

        return headers, attempt(read, range(len(samples)), num_threads)


def fetch(source: DataSet, sample: int, where: str) -> tuple[Any, Any]:
    """Image and label as they come."""
    with _faults_sorted(where):
        item = source[sample]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise UserError(f"{where} is a {type(item).__name__}; {_ITEM}")
    return item[0], item[1]


def _load_pixels(image: Image.Image, where: str) -> tuple[Image.Image, int]:
    """The image in RGB, and its EXIF orientation. Pillow's own loading is not safe in several threads at once."""
    with _LOCKS[id(image) // 64 % len(_LOCKS)], _faults_sorted(where):
        return image.convert("RGB"), orientation(image)


@contextmanager
def _faults_sorted(where: str) -> Iterator[None]:
    """A fault that may pass is not a bad image, and ends the run: leaving the image out would change the weights."""
    try:
        yield
    except Exception as error:
        passing = isinstance(error, MemoryError | TimeoutError | ConnectionError)
        if passing or (isinstance(error, OSError) and error.errno not in _LASTING_FAULTS):
            raise RunFailed(f"{where} cannot be loaded now: {describe(error)}") from error
        raise BadImage(describe(error)) from None


def as_image(image: Any, where: str) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    is_tensor = _is_tensor(image)
    if not is_tensor and not isinstance(image, np.ndarray):
        raise UserError(f"{where} has a {type(image).__name__} for an image; {_IMAGE}")
    array = _as_array(image)
    hwc = array.transpose(1, 2, 0) if is_tensor and array.ndim == 3 else array
    if array.dtype != np.uint8 or hwc.ndim != 3 or hwc.shape[2] != 3 or not hwc.size:
        kind = "tensor" if is_tensor else "array"
        raise UserError(f"{where} has a {array.dtype} {kind} of shape {array.shape} for an image; {_IMAGE}")
    return Image.fromarray(np.ascontiguousarray(hwc))


def as_label(label: Any, where: str) -> Label:
    array = _as_array(label)
    if array.ndim == 0 and array.dtype.kind in "iu":
        return int(array)
    if array.ndim == 1 and array.dtype.kind == "f" and np.isfinite(array).all() and (array >= 0).all():
        return array.astype(np.float32)
    raise UserError(f"{where} has the label {label!r:.60}; a label is a class number, or a probability for each class")


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def _as_array(value: Any) -> NDArray[Any]:
    return np.asarray(value.detach().cpu() if _is_tensor(value) else value)
