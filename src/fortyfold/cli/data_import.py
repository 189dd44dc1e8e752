"""`fortyfold data import …`"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fortyfold.cli.bars import bar

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from fortyfold.cli.bars import Report
    from fortyfold.data.prepare.image_folder import Tally

NAMES_SHOWN = 10

app = typer.Typer(
    help="Turn a data set's own archives into train/ and val/ with a folder a class. Killed, the same command goes on.",
    no_args_is_help=True,
)

Folder = Annotated[Path, typer.Argument(metavar="DST", help="The folder to make.")]
Archive = Annotated[Path | None, typer.Argument(metavar="ARCHIVE", help="The archive, a tar or tar.gz.")]
Download = Annotated[
    str | None, typer.Option("--download", metavar="URL", help="Download the archive (http, https) instead; resumed.")
]
Sha256 = Annotated[
    str | None, typer.Option("--sha256", metavar="HEX", help="The archive's SHA-256; --download needs it.")
]
Threads = Annotated[int, typer.Option(min=0, help="Threads that write; 0: one a core.")]


@app.command()
def imagenet(
    folder: Folder,
    train: Annotated[Path | None, typer.Option(metavar="TAR", help="ILSVRC2012_img_train.tar.")] = None,
    val: Annotated[Path | None, typer.Option(metavar="TAR", help="ILSVRC2012_img_val.tar.")] = None,
    devkit: Annotated[
        Path | None, typer.Option(metavar="TAR", help="ILSVRC2012_devkit_t12.tar.gz, for the labels of --val.")
    ] = None,
    val_map: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The labels of --val, `IMAGE WNID` a line, or Kaggle's LOC_val_solution.csv."
        ),
    ] = None,
    threads: Threads = 0,
) -> None:
    """ImageNet (ILSVRC2012) from image-net.org's archives, which need not be unpacked first.

    Give --train and --val at once, or one of them.
    """
    from fortyfold.data.prepare.imagenet import FULL_SIZES, ImagenetArchives, import_imagenet

    started = time.perf_counter()
    tally = import_imagenet(folder, ImagenetArchives(train, val, devkit, val_map), threads, _show)
    _report(folder, tally, started, FULL_SIZES)


@app.command()
def imagenetv2(
    folder: Folder, archive: Archive = None, download: Download = None, sha256: Sha256 = None, threads: Threads = 0
) -> None:
    """ImageNetV2, a second validation set for ImageNet: val/0 … val/999.

    Archives: imagenetv2-matched-frequency.tar.gz, -threshold0.7 or -top-images, as published on
    huggingface.co/datasets/vaishaal/ImageNetV2.
    """
    from fortyfold.data.prepare.imagenetv2 import import_imagenetv2
    from fortyfold.data.prepare.origin import Origin

    started = time.perf_counter()
    _report(folder, import_imagenetv2(folder, Origin(archive, download, sha256), threads, _show), started)


@app.command()
def cifar10(
    folder: Folder, archive: Archive = None, download: Download = None, sha256: Sha256 = None, threads: Threads = 0
) -> None:
    """CIFAR-10 as PNG files, the test batch in val/.

    Archives: cifar-10-binary.tar.gz or cifar-10-python.tar.gz of www.cs.toronto.edu/~kriz/cifar.html; both give
    the same files.
    """
    from fortyfold.data.prepare.cifar10 import import_cifar10
    from fortyfold.data.prepare.origin import Origin

    started = time.perf_counter()
    _report(folder, import_cifar10(folder, Origin(archive, download, sha256), threads, _show), started)


def _show(title: str) -> "AbstractContextManager[Report]":
    return bar(title, in_bytes=True)


def _report(folder: Path, tally: "Tally | None", started: float, full_sizes: dict[str, int] | None = None) -> None:
    if tally is None:
        print(f"{folder} is there already, whole")
        return
    for split in ("train", "val"):
        images, classes = tally.of(split)
        if images:
            full = (full_sizes or {}).get(split, images)
            note = "" if images == full else f" (the full set has {full})"
            print(f"{split:<5} {images} images, {classes} classes, {folder / split}{note}")
    if tally.skipped:
        more = len(tally.skipped) - NAMES_SHOWN
        names = ", ".join(tally.skipped[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        print(f"skipped {len(tally.skipped)} members of the archives: {names}")
    kept = f", {tally.num_kept} were there already" if tally.num_kept else ""
    print(f"imported in {time.perf_counter() - started:.1f} s{kept}")
