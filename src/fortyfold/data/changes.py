"""What is done to an image after its crop: a policy's operations, jitter, erasing. Drawn here, done by data/pixels.py.

Operations and their strengths are those of torchvision's RandAugment, TrivialAugmentWide and ColorJitter, rectangles
those of timm's RandomErasing; but all draws are pure functions of (seed, epoch, sample).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fortyfold.data.augment import CHANGE, ERASE, JITTER, NOISE, uniforms
from fortyfold.data.decode import Boxes
from fortyfold.data.order import Hashes, Ids, hash_ids
from fortyfold.spec.recipe import Augment

Colour = tuple[float, float, float]  # red, green, blue, 0 to 1

OPERATIONS = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
    "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize",
)  # fmt: skip
JITTERED = ("Brightness", "Contrast", "Color", "Hue")
STRONGEST = 30
_TRIES = 10
_MIN_AREA, _MAX_AREA = 0.02, 1 / 3
_MIN_RATIO, _MAX_RATIO = 0.3, 1 / 0.3


class Step(NamedTuple):
    """One operation on one image."""

    operation: str
    amount: float = 0.0
    """A slope, pixels, degrees, bits, a threshold, or a factor: as torchvision's function of the operation wants it."""


@dataclass(frozen=True)
class Changes:
    """A row an image."""

    steps: list[list[Step]]
    erased: Boxes  # all 0: nothing
    noise: Hashes  # what the erased box's bytes are drawn from
    fill: Colour | None  # instead of noise


class Reach(NamedTuple):
    """How far operations go at full strength."""

    shear: float
    translate_x: float
    translate_y: float
    rotate: float
    factor: float
    posterize: int


def draw_changes(augment: Augment, mean: Colour, keys: Ids, width: int, height: int, seed: int, epoch: int) -> Changes:
    """For images of width × height."""
    policy = _draw_policy(augment, keys, reach(augment.policy, width, height), seed, epoch)
    jitter = _draw_jitter(augment.jitter, keys, seed, epoch)
    return Changes(
        steps=[first + then for first, then in zip(policy, jitter, strict=True)],
        erased=draw_erased(keys, augment.erase, width, height, seed, epoch),
        noise=hash_ids(keys, seed, epoch, NOISE),
        fill=mean if augment.erase_fill == "mean" else None,
    )


def reach(policy: str, width: int, height: int) -> Reach:
    if policy == "rand":
        return Reach(0.3, 150 / 331 * width, 150 / 331 * height, 30.0, 0.9, 4)
    return Reach(0.99, 32.0, 32.0, 135.0, 0.99, 6)


def step_of(operation: str, strength: int, sign: int, reach: Reach) -> Step:
    """The operation at a strength of 0…STRONGEST, where it has one, to either side, where it has two."""
    level = strength / STRONGEST
    if operation in ("ShearX", "ShearY"):
        return Step(operation, sign * level * reach.shear)
    if operation in ("TranslateX", "TranslateY"):
        pixels = reach.translate_x if operation == "TranslateX" else reach.translate_y
        return Step(operation, sign * int(strength * pixels / STRONGEST))
    if operation == "Rotate":
        return Step(operation, sign * level * reach.rotate)
    if operation in ("Brightness", "Color", "Contrast", "Sharpness"):
        return Step(operation, 1 + sign * level * reach.factor)
    if operation == "Posterize":
        return Step(operation, 8 - round(level * reach.posterize))
    return Step(operation, 255 * (STRONGEST - strength) / STRONGEST) if operation == "Solarize" else Step(operation)


def _draw_policy(augment: Augment, keys: Ids, reach: Reach, seed: int, epoch: int) -> list[list[Step]]:
    if augment.policy == "none":
        return [[] for _ in keys]
    num_steps = augment.rand_ops if augment.policy == "rand" else 1
    draws = uniforms(keys, seed, epoch, CHANGE, 3 * num_steps).reshape(len(keys), num_steps, 3)
    chosen = (draws[..., 0] * len(OPERATIONS)).astype(int).tolist()
    any_strength = (draws[..., 1] * (STRONGEST + 1)).astype(int)
    strengths = np.full_like(any_strength, augment.rand_magnitude) if augment.policy == "rand" else any_strength
    signs = np.where(draws[..., 2] < 0.5, -1, 1).tolist()
    return [
        [step_of(OPERATIONS[which], strength, sign, reach) for which, strength, sign in zip(*row, strict=True)]
        for row in zip(chosen, strengths.tolist(), signs, strict=True)
    ]


def _draw_jitter(limits: tuple[float, ...], keys: Ids, seed: int, epoch: int) -> list[list[Step]]:
    """Those of the four that have a limit, in a random order."""
    if not any(limits):
        return [[] for _ in keys]
    draws = uniforms(keys, seed, epoch, JITTER, 8)
    centres = np.array([1.0, 1.0, 1.0, 0.0])
    least, most = np.maximum(centres - limits, [0, 0, 0, -0.5]), centres + limits
    amounts = (least + (most - least) * draws[:, :4]).tolist()
    orders = np.argsort(draws[:, 4:], axis=1).tolist()
    return [
        [Step(JITTERED[which], row[which]) for which in order if limits[which]]
        for row, order in zip(amounts, orders, strict=True)
    ]


def draw_erased(keys: Ids, share: float, width: int, height: int, seed: int, epoch: int) -> Boxes:
    """In `share` of the images a box of 2…33 % of the area, ten tries; all 0 in the others, and where none fits."""
    draws = uniforms(keys, seed, epoch, ERASE, 1 + 4 * _TRIES)
    tries = draws[:, 1:].reshape(len(keys), _TRIES, 4)
    area = width * height * (_MIN_AREA + (_MAX_AREA - _MIN_AREA) * tries[..., 0])
    ratio = np.exp(np.log(_MIN_RATIO) + (np.log(_MAX_RATIO) - np.log(_MIN_RATIO)) * tries[..., 1])
    sides = np.rint(np.sqrt(np.stack([area / ratio, area * ratio], axis=2)))  # n × tries × (width, height)
    fits = (sides < [width, height]).all(axis=2)
    chosen = (np.arange(len(keys)), fits.argmax(axis=1))  # the first that fits
    side = sides[chosen]
    corner = np.floor(tries[chosen][:, 2:] * ([width, height] - side + 1))
    erased = (draws[:, 0] < share) & fits.any(axis=1)
    return np.where(erased[:, None], np.concatenate([corner, corner + side], axis=1), 0).astype(np.int64)
