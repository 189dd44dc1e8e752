"""A folder that a command makes: held while it is made, marked when it is whole, never mixed with other files.

Killed at any moment, the same command goes on. Of two that make the same the second waits, and finds it made.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fortyfold.spec.errors import UserError
from fortyfold.spec.run_dir import write_json

MANIFEST, LOCK = "made.json", ".making"


@contextmanager
def making(folder: Path, by: str, arguments: Mapping[str, Any]) -> Iterator[bool]:
    """Hold `folder` while `by` (a command) makes in it what its `arguments` (JSON, they fix every byte) say.

    Gives False when it is there already. Leaving without an exception marks the folder as whole. A folder
    that holds anything else is refused; one where the same work was begun is not.
    """
    wanted = {"by": by, **arguments, "complete": True}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for torn in folder.glob(f".{MANIFEST}.*"):  # of a writer that was killed
                torn.unlink()
            found = _read_manifest(folder)
            if found == wanted:
                yield False
                return
            begun = {**wanted, "complete": False}
            if found != begun:
                _refuse_other(folder, found, wanted)
                write_json(folder / MANIFEST, begun)
            yield True
            write_json(folder / MANIFEST, wanted)
    except OSError as error:
        what = "" if error.filename is None else f" ({os.fsdecode(error.filename)})"
        raise UserError(f"cannot make {folder}: {error.strerror or error}{what}") from error


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """What a folder says it holds, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def was_made_by(folder: Path, command: str) -> bool:
    """Whether `command` made, or began to make, what is in the folder."""
    return (_read_manifest(folder) or {}).get("by") == command


def _refuse_other(folder: Path, found: dict[str, Any] | None, wanted: dict[str, Any]) -> None:
    if found is None:
        foreign = sorted(entry.name for entry in folder.iterdir() if entry.name != LOCK)
        if foreign:
            raise UserError(f"{folder} already has files in it ({foreign[0]}); choose another folder, or remove them")
        return
    if found.get("by") != wanted["by"]:
        raise UserError(f"{folder} already has the work of `{found.get('by')}` in it; choose another folder")
    keys = [key for key in wanted if key != "complete" and found.get(key) != wanted[key]]
    differing = ", ".join(f"{key} = {found.get(key)} (now {wanted[key]})" for key in keys)
    raise UserError(f"{folder} was made with {differing}; choose another folder, or remove it first")
