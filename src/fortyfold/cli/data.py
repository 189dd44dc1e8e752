"""`fortyfold data …`"""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from fortyfold.cli import data_import
from fortyfold.cli.bars import bar
from fortyfold.spec.errors import UserError

app = typer.Typer(help="Make, look at and prepare data sets.", no_args_is_help=True)
app.add_typer(data_import.app, name="import")

Folder = Annotated[Path, typer.Argument(metavar="DIR")]


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
    width, height = _parse_px(px)
    make_demo_data(folder, classes, images, width, height, seed, workers)


@app.command()
def index(
    folder: Folder,
    fresh: Annotated[bool, typer.Option("--fresh", help="Scan even if the cache is true.")] = False,
) -> None:
    """Count a data set's classes and images, and cache the list of its files."""
    from fortyfold.data.index import SPLIT_FOLDERS, find_split, open_folder

    for split in SPLIT_FOLDERS:
        place = find_split(folder, split)
        started = time.perf_counter()
        with bar(f"indexing {split}") as report:
            found = open_folder(place, fresh=fresh, progress=report)
        seconds = time.perf_counter() - started
        print(f"{split:<5} {len(found)} images, {len(found.classes)} classes, {place} ({seconds:.1f} s)")


def make_demo_data(
    folder: Path, classes: int, images: int, width: int, height: int, seed: int,
    workers: int = 0, check: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Make it unless it is there, and say which. `check` is called now and then and may raise to stop."""
    from fortyfold.data.demo import DemoSpec, make_demo

    spec = DemoSpec(classes, images, width, height, seed)
    started = time.perf_counter()
    with bar("making demo images", check) as report:
        made = make_demo(folder, spec, workers, report)
    counts = ", ".join(f"{count} {split}" for split, count in spec.splits().items())
    how = f"made in {time.perf_counter() - started:.1f} s" if made else "already there"
    print(f"demo data: {counts} images, {classes} classes, {width} × {height} pixels, in {folder} ({how})")


def _parse_px(px: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", px)
    if not match or min(sides := [int(side) for side in match.groups(match[1])]) < 16 or max(sides) > 8192:
        raise UserError(f"--px {px}: give a side from 16 to 8192, as in --px 96, or both, as in --px 500x375")
    return sides[0], sides[1]
