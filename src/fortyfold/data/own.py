"""From somebody's own data set object to an Index: in order, crops and augmentation it is then like any other.

The object has a length and items (image, label), see data/items.py. Classes are named by its `classes`; else they
are numbers, counted by `num_classes`, by the probabilities of the first item, or by its `labels` (or `targets`, as
torchvision has it).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fortyfold.data.index import Index
from fortyfold.data.items import DataSet, Items, Label, as_image, as_label, fetch
from fortyfold.data.pillow_decode import BadImage
from fortyfold.spec.errors import UserError

_UNKNOWN = -1  # a label
_PROBED = 8  # items tried before the data set is found to be no good


def open_own(source: DataSet, name: str = "data_set", num_classes: int | None = None) -> Index:
    """The index of `source`, which errors call `name`."""
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise UserError(
            f"{name} is no data set but an object of type {type(source).__name__}; "
            "it needs a length and items (image, label)"
        )
    num_samples = len(source)
    if not num_samples:
        raise UserError(f"{name} is empty")
    first = _first_label(source, num_samples, name)
    labels = _known_labels(source, num_samples, name)
    classes = _class_names(source, name, num_classes, first, labels)
    wrong = np.flatnonzero(labels >= len(classes))
    if len(wrong):
        raise UserError(
            f"{name}[{wrong[0]}] has the label {labels[wrong[0]]}; there are classes 0 to {len(classes) - 1}"
        )
    items = Items(source, name, len(classes), soft=not isinstance(first, int))
    return Index(Path(name), classes, labels, b"", np.zeros(num_samples, np.int64), items=items)


def _first_label(source: DataSet, num_samples: int, name: str) -> Label:
    """Of the first item that can be loaded; whatever is wrong with all of them is wrong with that one."""
    reasons = []
    for sample in range(min(_PROBED, num_samples)):
        try:
            image, label = fetch(source, sample, name)
        except BadImage as error:
            reasons.append(str(error))
            continue
        as_image(image, f"{name}[{sample}]")
        return as_label(label, f"{name}[{sample}]")
    raise UserError(f"{name}: its first {len(reasons)} items cannot be loaded; {name}[0]: {reasons[0]}")


def _known_labels(source: Any, num_samples: int, name: str) -> NDArray[np.int32]:
    """As far as the object tells without its items."""
    for attribute in ("labels", "targets"):
        try:
            labels = np.asarray(getattr(source, attribute))
        except (AttributeError, ValueError):
            continue
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            continue
        if len(labels) != num_samples:
            raise UserError(f"{name} has {num_samples} items but {len(labels)} {attribute}")
        if labels.min() < 0:
            raise UserError(f"{name}.{attribute}[{labels.argmin()}] is {labels.min()}; classes count from 0")
        return labels.astype(np.int32)
    return np.full(num_samples, _UNKNOWN, np.int32)


def _class_names(
    source: Any, name: str, num_classes: int | None, first: Label, labels: NDArray[np.int32]
) -> tuple[str, ...]:
    named = getattr(source, "classes", None)
    if isinstance(named, Sequence) and not isinstance(named, str) and len(named):
        if num_classes not in (None, len(named)):
            raise UserError(f"{name}.classes names {len(named)} classes, but num_classes = {num_classes}")
        return tuple(map(str, named))
    if num_classes is None and not isinstance(first, int):
        num_classes = len(first)
    if num_classes is None and labels[0] != _UNKNOWN:
        num_classes = int(labels.max()) + 1
    if num_classes is None or num_classes < 1:
        raise UserError(f"{name} does not tell its classes; give it a list `classes`, or say num_classes")
    return tuple(map(str, range(num_classes)))
