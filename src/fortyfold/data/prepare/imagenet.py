"""ILSVRC2012 out of its archives, without unpacking anything twice.

The training archive is a tar of a tar a class; an inner tar is a range of bytes of the outer file, so threads
take a class each. The validation archive is flat; its labels come from the devkit or from a list.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fortyfold.data.cores import available_cores
from fortyfold.data.prepare.archive import Source, archive_bytes, files
from fortyfold.data.prepare.image_folder import (
    Place,
    Show,
    SplitFolder,
    Tally,
    check_exact,
    importing,
    missing_files,
    unpacked_bytes,
)
from fortyfold.data.prepare.imagenet_labels import Labels, read_devkit, read_val_map
from fortyfold.data.prepare.work import ordered, replace_file, require_space, settle
from fortyfold.spec.errors import UserError

FULL_SIZES = {"train": 1_281_167, "val": 50_000}
_CLASS_TAR = re.compile(r"(?:.*/)?(n\d{8})\.tar")
_TRAIN_IMAGE = re.compile(r"(?:.*/)?((n\d{8})_\d+\.JPEG)")
_VAL_IMAGE = re.compile(r"(?:.*/)?(ILSVRC2012_val_(\d{8})\.JPEG)")


@dataclass(frozen=True)
class ImagenetArchives:
    """What was given; `devkit` or `val_map` goes with `val`."""

    train: Path | None
    val: Path | None
    devkit: Path | None
    val_map: Path | None

    def check(self) -> None:
        if not self.train and not self.val:
            raise UserError("give --train ILSVRC2012_img_train.tar, or --val ILSVRC2012_img_val.tar, or both")
        if bool(self.devkit or self.val_map) != bool(self.val) or (self.devkit and self.val_map):
            raise UserError("--val needs its labels: give --devkit or --val-map with it, one of them")

    def names(self) -> dict[str, str | None]:
        labels = self.devkit or self.val_map
        given = {"train": self.train, "val": self.val, "labels": labels}
        return {key: path.name if path else None for key, path in given.items()}


@dataclass(frozen=True)
class ClassTar:
    """The images of one class: bytes start…stop of the training archive."""

    class_name: str
    start: int
    stop: int


def import_imagenet(folder: Path, archives: ImagenetArchives, num_threads: int, show: Show) -> Tally | None:
    """Make `folder`/train and /val; None if they are there already."""
    archives.check()
    num_threads = num_threads or available_cores()
    with importing(folder, "data import imagenet", archives.names()) as needed:
        if not needed:
            return None
        tally = Tally()
        labels = _read_labels(archives)
        class_tars = find_class_tars(archives.train, tally.skipped) if archives.train else []
        total = sum(archive_bytes(path) for path in (archives.train, archives.val) if path)
        require_space(folder, unpacked_bytes(folder, total))
        with show("importing ImageNet") as progress:
            done = 0
            if archives.val:  # first: a mistake in the labels is found within minutes
                for read in _import_val(folder, archives.val, labels, num_threads, tally):
                    progress(read, total)
                done = archive_bytes(archives.val)
            if archives.train:
                for read in _import_train(folder, archives.train, class_tars, num_threads, tally):
                    progress(done + read, total)
        check_exact(folder, tally)
        settle()
    return tally


def _read_labels(archives: ImagenetArchives) -> Labels:
    if archives.devkit:
        return read_devkit(archives.devkit)
    return read_val_map(archives.val_map) if archives.val_map else {}


def find_class_tars(path: Path, skipped: list[str]) -> list[ClassTar]:
    """The inner tars of the training archive; reads a header a class and the end mark."""
    found: dict[str, ClassTar] = {}
    with Source(path) as source:
        if source.is_compressed:
            raise UserError(f"{path} is compressed; unpack it first (gunzip), since it is read in many places at once")
        for member in files(source, skipped):
            match = _CLASS_TAR.fullmatch(member.name)
            if not match or match[1] in found:
                skipped.append(f"{member.name!r} ({'a second one of this class' if match else 'not a class'})")
            else:
                found[match[1]] = ClassTar(match[1], member.start, member.start + member.size)
    if not found:
        raise UserError(f"{path} has no n01440764.tar or the like in it; give ILSVRC2012_img_train.tar")
    return list(found.values())


def _import_train(
    folder: Path, path: Path, class_tars: list[ClassTar], num_threads: int, tally: Tally
) -> Iterator[int]:
    """How far into the archive it is done, class by class."""

    def unpack(class_tar: ClassTar) -> tuple[int, Tally]:
        done = Tally()
        with Source(path, class_tar.start, class_tar.stop) as source:
            split = SplitFolder(folder, "train")
            for target, content in missing_files(source, split, _place_in(class_tar.class_name), done):
                replace_file(target, content)
        return class_tar.stop, done

    for stop, done in ordered(unpack, class_tars, num_threads):
        tally.add(done)
        yield stop


def _place_in(class_name: str) -> Place:
    def place(name: str) -> tuple[str, str] | None:
        match = _TRAIN_IMAGE.fullmatch(name)
        return (class_name, match[1]) if match and match[2] == class_name else None

    return place


def _import_val(folder: Path, path: Path, labels: Labels, num_threads: int, tally: Tally) -> Iterator[int]:
    """How far into the archive it is done, image by image."""

    def place(name: str) -> tuple[str, str] | None:
        match = _VAL_IMAGE.fullmatch(name)
        if match and int(match[2]) not in labels:
            raise UserError(f"{match[1]} of {path} has no label; the devkit or --val-map must name all of them")
        return (labels[int(match[2])], match[1]) if match else None

    with Source(path) as source:
        missing = missing_files(source, SplitFolder(folder, "val"), place, tally)
        for _ in ordered(lambda item: replace_file(*item), missing, num_threads):
            yield source.bytes_read()
    if not tally.of("val")[0]:
        raise UserError(f"{path} has no ILSVRC2012_val_00000001.JPEG or the like in it; give ILSVRC2012_img_val.tar")
