"""`fortyfold data …`"""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fortyfold.cli import data_import
from fortyfold.cli.bars import bar
from fortyfold.cli.data_check import check
from fortyfold.cli.data_shard import shard
from fortyfold.cli.data_stage import stage
from fortyfold.spec.errors import UserError

if TYPE_CHECKING:
    from fortyfold.data.demo import DemoSpec
    from fortyfold.data.prepare.resize import Resized

app = typer.Typer(help="Make, look at and prepare data sets.", no_args_is_help=True)
app.add_typer(data_import.app, name="import")


Folder = Annotated[Path, typer.Argument(metavar="DIR")]
Source = Annotated[Path, typer.Argument(metavar="SRC", help="A folder with train/ and val/, or with class folders.")]
Target = Annotated[Path, typer.Argument(metavar="DST", help="A new folder, or one that this command began.")]
Threads = Annotated[int, typer.Option(min=0, help="Threads that work; 0: one a core.")]

_NAMED = 10  # findings that are named in the terminal


@app.command()
def demo(
    folder: Folder,
    classes: Annotated[int, typer.Option(help="How many classes, 2 to 1000.")] = 10,
    images: Annotated[int, typer.Option(help="How many images in all; one in six is for validation.")] = 6000,
    px: Annotated[str, typer.Option(help="Side of an image, or WIDTHxHEIGHT.")] = "96",
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Processes that make images; 0: one a core.")] = 0,
) -> None:
    """Make the embedded data set: procedural JPEGs in train/ and val/, a folder a class."""
    from fortyfold.data.demo import DemoSpec

    make_demo_data(folder, DemoSpec(classes, images, *_parse_px(px), seed), workers)


@app.command()
def index(
    folder: Folder,
    fresh: Annotated[bool, typer.Option("--fresh", help="Scan even if the cache is true.")] = False,
) -> None:
    """Count a data set's classes and images, and cache the list of its files."""
    from fortyfold.data.splits import SPLIT_FOLDERS, find_split, open_folder

    for split in SPLIT_FOLDERS:
        place = find_split(folder, split)
        started = time.perf_counter()
        with bar(f"indexing {split}") as report:
            found = open_folder(place, fresh=fresh, progress=report)
        seconds = time.perf_counter() - started
        print(f"{split:<5} {len(found)} images, {len(found.classes)} classes, {place} ({seconds:.1f} s)")


@app.command()
def resize(
    source: Source,
    target: Target,
    short_side: Annotated[str, typer.Option(help="Longest shorter side in pixels; several give a copy each: 160,352.")],
    quality: Annotated[int, typer.Option(min=1, max=100, help="Of the JPEGs that are made.")] = 90,
    threads: Threads = 0,
) -> None:
    """Copy a data set with smaller images, to DST/160/train/... and so on: they decode several times faster.

    Names, and with them sample ids and their order, stay as they are. Small images and those that cannot be
    decoded are copied byte for byte. Killed, the same command goes on.
    """
    from fortyfold.data.prepare.resize import ResizeSpec, make_resized

    spec = ResizeSpec(_parse_sides(short_side), quality)
    started = time.perf_counter()
    with bar("resizing images") as report:
        result = make_resized(source, target, spec, threads, report)
    seconds = time.perf_counter() - started
    if result.already_there:
        print(f"{result.num_images} images, shorter side {short_side}, in {target} (already there)")
    else:
        _print_resized(result, target, seconds)


def _print_resized(result: "Resized", target: Path, seconds: float) -> None:
    from fortyfold.data.prepare.resize import UNREADABLE
    from fortyfold.data.prepare.work import in_words, printable

    for side, copy in result.copies.items():
        counts = ", ".join(f"{count} {kind}" for kind, count in copy.counts.items())
        sizes = f"{in_words(result.source_bytes)} before, {in_words(copy.num_bytes)} after"
        print(f"{target / str(side)}: {counts}; {sizes}")
    for below, reason in result.unreadable[:_NAMED]:
        print(f"unreadable, copied as it is: {printable(below)}: {reason}")
    if len(result.unreadable) > _NAMED:
        print(f"{len(result.unreadable) - _NAMED} more are named in {target / UNREADABLE}")
    there = result.num_images - result.num_worked
    earlier = f" ({there} were made before)" if there else ""
    print(f"{result.num_worked} images in {seconds:.1f} s, {result.num_worked / seconds:.0f} images/s{earlier}")


app.command()(shard)
app.command()(stage)
app.command()(check)


def make_demo_data(folder: Path, spec: "DemoSpec", workers: int = 0, check: Callable[[], None] | None = None) -> None:
    """Make it unless it is there, and say which. `check` is called now and then and may raise to stop."""
    from fortyfold.data.demo import make_demo

    started = time.perf_counter()
    with bar("making demo images", check) as report:
        made = make_demo(folder, spec, workers, report)
    counts = ", ".join(f"{count} {split}" for split, count in spec.splits().items())
    how = f"made in {time.perf_counter() - started:.1f} s" if made else "already there"
    print(
        f"demo data: {counts} images, {spec.classes} classes, {spec.width} × {spec.height} pixels, in {folder} ({how})"
    )


def _parse_px(px: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", px)
    if not match or min(sides := [int(side) for side in match.groups(match[1])]) < 16 or max(sides) > 8192:
        raise UserError(f"--px {px}: give a side from 16 to 8192, as in --px 96, or both, as in --px 500x375")
    return sides[0], sides[1]


def _parse_sides(text: str) -> tuple[int, ...]:
    sides = [int(side) for side in text.split(",")] if re.fullmatch(r"[1-9]\d{0,4}(,[1-9]\d{0,4})*", text) else []
    if not sides or len(set(sides)) != len(sides):
        raise UserError(f"--short-side {text}: give a number of pixels, as in 160, or different ones, as in 160,352")
    return tuple(sorted(sides))
