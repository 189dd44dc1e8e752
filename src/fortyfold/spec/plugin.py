"""Extension by file: a plug-in is a module of a package, and its file's name is its name."""

import difflib
import importlib
import pkgutil
import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from types import ModuleType

from fortyfold.spec.errors import UserError


def names(package: str) -> list[str]:
    """The plug-ins of `package` (say, "fortyfold.schedules"), sorted; nothing is imported."""
    root, *folders = package.split(".")
    path = Path(str(files(root))).joinpath(*folders)
    return sorted(info.name for info in pkgutil.iter_modules([str(path)]))


def require(package: str, name: str) -> None:
    """A wrong name is an error that lists the right ones; the module is not imported."""
    valid = names(package)
    if name not in valid:
        kind = re.sub(r"(ie)?s$", lambda end: "y" if end[1] else "", package.rpartition(".")[2])
        raise UserError(f"no {kind} {name!r}; there are: {', '.join(valid)}{nearest(name, valid)}")


def load(package: str, name: str) -> ModuleType:
    """The module `name` of `package`; a wrong name is an error that lists the right ones."""
    require(package, name)
    return importlib.import_module(f"{package}.{name}")


def nearest(word: str, valid: Iterable[str]) -> str:
    """'; did you mean …?' for the valid word most like `word`, or nothing when none is alike."""
    close = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
