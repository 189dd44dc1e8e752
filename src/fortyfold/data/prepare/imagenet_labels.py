"""The class of each ILSVRC2012 validation image: number (1…50000) → WordNet id, from the devkit or from a list."""

import re
from pathlib import Path

from fortyfold.data.prepare.archive import Source, files
from fortyfold.data.prepare.mat5 import Mat5Error, struct_fields
from fortyfold.spec.errors import UserError

NUM_CLASSES = 1000  # larger ids are inner nodes of the hierarchy
_GROUND_TRUTH, _META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
_WNID = re.compile(r"n\d{8}")
_LINE = re.compile(r"ILSVRC2012_val_(\d{8})(?:\.JPEG)?[\s,]+(n\d{8})(?:\s.*)?")
_MOST_BYTES = 64 << 20

Labels = dict[int, str]


def read_devkit(path: Path) -> Labels:
    """Labels out of ILSVRC2012_devkit_t12.tar.gz."""
    found = _read_members(path)
    wnids = _wnids(path, found[_META])
    labels: Labels = {}
    for number, line in enumerate(found[_GROUND_TRUTH].decode("ascii", "replace").splitlines(), start=1):
        if not line.strip().isdecimal() or int(line) not in wnids:
            raise UserError(f"{path}: line {number} of {_GROUND_TRUTH} is {line[:20]!r}, no class of {_META}")
        labels[number] = wnids[int(line)]
    return labels


def _read_members(path: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with Source(path) as source:
        for member in files(source, []):
            name = member.name.rpartition("/")[2]
            if name in (_GROUND_TRUTH, _META) and name not in found and member.size <= _MOST_BYTES:
                found[name] = source.read(member.size)
    for name in (_GROUND_TRUTH, _META):
        if name not in found:
            raise UserError(f"{path} has no {name}; give ILSVRC2012_devkit_t12.tar.gz, or --val-map FILE")
    return found


def _wnids(path: Path, meta: bytes) -> dict[int, str]:
    try:
        ids, wnids = struct_fields(meta, "synsets", ("ILSVRC2012_ID", "WNID"))
    except Mat5Error as error:
        raise UserError(f"{path}: cannot read {_META}: {error}; get it again, or give --val-map FILE") from None
    pairs = {(id, wnid) for id, wnid in zip(ids, wnids, strict=False) if id in range(1, NUM_CLASSES + 1)}
    found = {int(id): str(wnid) for id, wnid in pairs}
    if len(ids) != len(wnids) or len(pairs) != len(found) or not all(map(_WNID.fullmatch, found.values())):
        raise UserError(f"{path}: {_META} does not give each class one WordNet id; get it again")
    return found


def read_val_map(path: Path) -> Labels:
    """Labels out of a text: `ILSVRC2012_val_00000001.JPEG n01751748` a line, or Kaggle's LOC_val_solution.csv."""
    labels: Labels = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == 1 and line.startswith("ImageId")):
            continue
        match = _LINE.fullmatch(line.strip())
        if not match:
            raise UserError(f"{path}: line {number} is {line[:60]!r}, not `ILSVRC2012_val_00000001.JPEG n01751748`")
        if labels.setdefault(int(match[1]), match[2]) != match[2]:
            raise UserError(f"{path}: line {number} gives ILSVRC2012_val_{match[1]} a second class; remove one")
    return labels
