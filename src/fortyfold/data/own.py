"""From somebody's own data set object to an Index: in order, crops and augmentation it is then like any other.

The object has a length and items (image, label), see data/items.py. Classes are named by its `classes`; else they
are numbers, counted by `num_classes`, by the probabilities of the first item, or, where nothing else tells, by its
`labels` (or `targets`, as torchvision has it).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fortyfold.data.index import Index
from fortyfold.data.items import DataSet, Items, Label, as_image, as_label, fetch
from fortyfold.data.pillow_decode import BadImage
from fortyfold.spec.errors import UserError

_UNKNOWN = -1  # a label
_PROBED = 8  # items tried before the data set is found to be no good


def open_own(
    source: DataSet, name: str = "data_set", num_classes: int | None = None, counted_by: str = "num_classes ="
) -> Index:
    """The index of `source`, which errors call `name`; `counted_by` says in them where `num_classes` is from."""
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise UserError(
            f"{name} is no data set but an object of type {type(source).__name__}; "
            "it needs a length and items (image, label)"
        )
    num_samples = len(source)
    if not num_samples:
        raise UserError(f"{name} is empty")
    first = _first_label(source, num_samples, name)
    classes = _class_names(source, first, num_classes)
    if classes is None:
        raise UserError(f"{name} does not tell its classes; give it a list `classes`, or say num_classes")
    if num_classes not in (None, len(classes)):
        raise UserError(f"{name}.classes names {len(classes)} classes, but {counted_by} {num_classes}")
    items = Items(source, name, len(classes), soft=not isinstance(first, int))
    labels = np.full(num_samples, _UNKNOWN, np.int32)
    return Index(Path(name), classes, labels, b"", np.zeros(num_samples, np.int64), items=items)


def _first_label(source: DataSet, num_samples: int, name: str) -> Label:
    """Of the first item that can be loaded; whatever is wrong with all of them is wrong with that one."""
    reasons = []
    for sample in range(min(_PROBED, num_samples)):
        try:
            image, label = fetch(source, sample, f"{name}[{sample}]")
        except BadImage as error:
            reasons.append(str(error))
            continue
        as_image(image, f"{name}[{sample}]")
        return as_label(label, f"{name}[{sample}]")
    raise UserError(f"{name}: its first {len(reasons)} items cannot be loaded; {name}[0]: {reasons[0]}")


def _class_names(source: Any, first: Label, num_classes: int | None) -> tuple[str, ...] | None:
    named = getattr(source, "classes", None)
    if isinstance(named, Sequence) and not isinstance(named, str) and len(named):
        return tuple(map(str, named))
    if num_classes is None:
        num_classes = _count_labels(source, first) if isinstance(first, int) else len(first)
    return tuple(map(str, range(num_classes))) if num_classes and num_classes > 0 else None


def _count_labels(source: Any, first: int) -> int | None:
    """By an attribute with the label of each item, if it is one: what has that name may be anything."""
    for attribute in ("labels", "targets"):
        try:
            labels = np.asarray(getattr(source, attribute))
        except Exception:
            labels = np.empty(0)
        if labels.shape == (len(source),) and labels.dtype.kind in "iu" and labels.min() >= 0:
            return max(int(labels.max()), first) + 1
    return None
