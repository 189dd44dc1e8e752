"""Resized copies of a data set, as `data resize` makes them: a folder 160/, 352/, … for each shorter side.

A copy has the same files under the same names, so the same sample ids; only its pixels are fewer.
"""

from pathlib import Path

from fortyfold.data.index import Index
from fortyfold.data.splits import open_split
from fortyfold.spec.errors import UserError

ORIGINAL = "original"


def copy_sides(folder: Path) -> list[int]:
    """The shorter sides of which there are copies, from small to large."""
    if not folder.is_dir():
        raise UserError(f"data.copies: there is no folder {folder}; make it with fortyfold data resize")
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal() and entry.is_dir())


def choose_copy(sides: list[int], px: int, crop_ratio: float, named: int | str | None) -> str:
    """The copy that was named, or the smallest whose centre crop is not enlarged to `px`, or the original."""
    if named is not None:
        if named != ORIGINAL and named not in sides:
            there = ", ".join(map(str, sides)) or "none"
            raise UserError(
                f"data_copy = {named!r}: there is no such copy (there are {there}); {ORIGINAL!r} names the data"
            )
        return str(named)
    return next((str(side) for side in sides if side * crop_ratio >= px), ORIGINAL)


def open_copy(folder: Path, name: str, split: str, original: Index) -> Index:
    """The split of a copy; it must have the same files as the original."""
    if name == ORIGINAL:
        return original
    index = open_split(folder / name, split)
    if index.fingerprint != original.fingerprint:
        raise UserError(
            f"the copy {folder / name} has other {split} images than {original.folder} "
            f"({len(index)}, not {len(original)}, or other names); run fortyfold data resize again"
        )
    return index
