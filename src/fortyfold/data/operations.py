"""The operations of data/changes.py, by torchvision's functions, on one uint8 HWC image in place.

torchvision's own classes draw from torch's global generator, which threads share; the functions draw nothing.
"""

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fortyfold.data.changes import Step
from fortyfold.torchvision_import import functional as F

_set_openmp_threads: Callable[[int], None] | None = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)


def operate(image: NDArray[np.uint8], steps: list[Step]) -> None:
    """One operation after another."""
    if not steps:
        return
    with torch.inference_mode(), _single_threaded():
        changed = torch.from_numpy(image).permute(2, 0, 1).contiguous()
        for operation, amount in steps:
            changed = _FUNCTIONS[operation](changed, amount)
        image[:] = changed.permute(1, 2, 0).numpy()


@contextmanager
def _single_threaded() -> Iterator[None]:
    """torch's operations stay in the calling thread: the images of a batch already share the cores.

    OpenMP's setting is the calling thread's own, torch.set_num_threads is everybody's. Only speed hangs on it.
    """
    num_threads = torch.get_num_threads()  # also lets torch set the thread up, which would undo ours later
    if _set_openmp_threads is None:
        yield
        return
    _set_openmp_threads(1)
    try:
        yield
    finally:
        _set_openmp_threads(num_threads)


def _affine(image: torch.Tensor, **how: Any) -> torch.Tensor:
    moved: torch.Tensor = F.affine(
        image, **{"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0]} | how
    )
    return moved


def _degrees(slope: float) -> float:
    return math.degrees(math.atan(slope))


def _contrast(image: torch.Tensor, factor: float) -> torch.Tensor:
    """F.adjust_contrast with a mean of whole numbers added exactly: above 256 px torch's depends on its threads."""
    grey = F.rgb_to_grayscale(image)
    mean = torch.tensor(float(grey.sum(dtype=torch.int64))) / grey.numel()
    return image.mul(factor).add_(mean, alpha=1 - factor).clamp_(0, 255).to(torch.uint8)


_FUNCTIONS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "Identity": lambda image, _: image,
    "ShearX": lambda image, slope: _affine(image, shear=[_degrees(slope), 0.0], center=[0, 0]),
    "ShearY": lambda image, slope: _affine(image, shear=[0.0, _degrees(slope)], center=[0, 0]),
    "TranslateX": lambda image, pixels: _affine(image, translate=[int(pixels), 0]),
    "TranslateY": lambda image, pixels: _affine(image, translate=[0, int(pixels)]),
    "Rotate": lambda image, degrees: F.rotate(image, degrees),
    "Brightness": lambda image, factor: F.adjust_brightness(image, factor),
    "Color": lambda image, factor: F.adjust_saturation(image, factor),
    "Contrast": _contrast,
    "Sharpness": lambda image, factor: F.adjust_sharpness(image, factor),
    "Hue": lambda image, turn: F.adjust_hue(image, turn),
    "Posterize": lambda image, bits: F.posterize(image, int(bits)),
    "Solarize": lambda image, threshold: F.solarize(image, threshold),
    "AutoContrast": lambda image, _: F.autocontrast(image),
    "Equalize": lambda image, _: F.equalize(image),
}
