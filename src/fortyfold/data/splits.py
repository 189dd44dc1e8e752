"""Finding a data set's splits: folders of class folders, or of shards, in any of the usual layouts."""

from contextlib import suppress
from pathlib import Path

from fortyfold.data.folders import ScanProgress, open_class_folders
from fortyfold.data.index import Index
from fortyfold.data.shards import is_sharded, open_shards
from fortyfold.spec.errors import UserError

SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "validation")}
LAYOUT_PREFIXES = ("", "Data/CLS-LOC", "ILSVRC/Data/CLS-LOC")


def find_split(root: Path, split: str) -> Path:
    """The folder of `split` ("train" or "val") below `root`, in any of the usual layouts."""
    if not root.is_dir():
        raise UserError(f"no data folder {root}; give --data DIR, or make one: fortyfold data demo {root}")
    tried = [root / prefix / name for prefix in LAYOUT_PREFIXES for name in SPLIT_FOLDERS[split]]
    for folder in tried:
        if folder.is_dir():
            return folder
    names = " or ".join(f"{name}/" for name in SPLIT_FOLDERS[split])
    raise UserError(f"{root} has no {names} (nor below {LAYOUT_PREFIXES[1]}); it needs one with a folder a class in it")


def open_split(root: Path, split: str, *, fresh: bool = False, progress: ScanProgress | None = None) -> Index:
    """The index of a split, from the cache if that is still true (and not `fresh`), else by a scan."""
    return open_folder(find_split(root, split), fresh=fresh, progress=progress)


def find_splits(root: Path) -> dict[str, Path]:
    """The folder of each split that `root` has; {"": root} if it has none and so is a split itself."""
    if not root.is_dir():
        raise UserError(f"no data folder {root}")
    found = {}
    for split in SPLIT_FOLDERS:
        with suppress(UserError):
            found[split] = find_split(root, split)
    return found or {"": root}


def open_folder(folder: Path, *, fresh: bool = False, progress: ScanProgress | None = None) -> Index:
    """The index of a folder of class folders, or of shards."""
    folder = folder.resolve()
    return open_shards(folder) if is_sharded(folder) else open_class_folders(folder, fresh=fresh, progress=progress)
