"""ImageNetV2 out of its archive: <any>/<0…999>/<hash>.jpeg becomes DST/val/<0…999>/<hash>.jpeg.

The folders count ImageNet's classes in sorted order, which `data/index.py` knows.
"""

import re
from pathlib import Path

from fortyfold.data.cores import available_cores
from fortyfold.data.prepare.archive import Source, archive_bytes
from fortyfold.data.prepare.image_folder import (
    Show,
    SplitFolder,
    Tally,
    check_exact,
    missing_files,
    unpacked_bytes,
)
from fortyfold.data.prepare.origin import Origin, import_archive
from fortyfold.data.prepare.work import ordered, replace_file, require_space, settle
from fortyfold.spec.errors import UserError

_IMAGE = re.compile(r"(?:.*/)?(0|[1-9]\d{0,2})/([\w-]+\.jpe?g)")


def import_imagenetv2(folder: Path, origin: Origin, num_threads: int, show: Show) -> Tally | None:
    """Make `folder`/val; None if it is there already."""
    threads = num_threads or available_cores()
    return import_archive(folder, "data import imagenetv2", origin, lambda: _fill(folder, origin, threads, show))


def _fill(folder: Path, origin: Origin, num_threads: int, show: Show) -> Tally:
    tally = Tally()
    path = origin.fetch(folder, lambda archive_bytes: unpacked_bytes(folder, archive_bytes), show)
    with Source(path) as source, show("importing ImageNetV2") as progress:
        total = archive_bytes(path)
        require_space(folder, unpacked_bytes(folder, total))
        missing = missing_files(source, SplitFolder(folder, "val"), _place, tally)
        for _ in ordered(lambda item: replace_file(*item), missing, num_threads):
            progress(source.bytes_read(), total)
    if not tally.images:
        raise UserError(
            f"{path} has no <0…999>/<name>.jpeg in it; give imagenetv2-matched-frequency.tar.gz or the like"
        )
    check_exact(folder, tally)
    settle()
    return tally


def _place(name: str) -> tuple[str, str] | None:
    match = _IMAGE.fullmatch(name)
    return (match[1], match[2]) if match else None
