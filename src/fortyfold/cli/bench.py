"""`fortyfold bench …`: how fast this machine is at one thing."""

import re
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fortyfold.cli.bars import bar
from fortyfold.spec.errors import UserError

if TYPE_CHECKING:
    from fortyfold.data.index import Index
    from fortyfold.data.speed import Speed

app = typer.Typer(help="Measure how fast this machine is.", no_args_is_help=True)

_HEAD = (
    f"{'data':<24} {'threads':>7} {'px':>5} {'img/s':>8} {'of limit':>8}  "
    f"{'read':>5} {'decode':>6} {'resize':>6} {'python':>10}"
)


@app.callback()
def _bench() -> None:
    """Measure how fast this machine is."""


@app.command()
def loader(
    data: Annotated[
        list[Path], typer.Argument(metavar="DATA...", help="Data sets, or splits: folders of classes, shards, copies.")
    ],
    threads: Annotated[str, typer.Option(help="Numbers of threads, as in 1,2,8; 0: one a core.")] = "1,0",
    px: Annotated[str, typer.Option(help="Sides of the images, as in 128,224.")] = "128,224",
    batch: Annotated[int, typer.Option(min=1, help="Images a batch.")] = 256,
    min_scale: Annotated[float, typer.Option(min=0.001, max=1, help="Smallest crop, as a share of the area.")] = 0.08,
    validation: Annotated[bool, typer.Option("--validation", help="Centre crops (0.875) and not random ones.")] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each line is measured.")] = 3.0,
) -> None:
    """Images a second by threads, data and px, where the time goes, and how near that is to the decoder alone.

    "of limit" is the rate over that of the decoder alone; read, decode and resize are shares of the decoder's
    threads; python is what the loader itself takes for an image, holding the interpreter's lock.
    """
    from fortyfold.data import decode
    from fortyfold.data.cores import available_cores

    cores = available_cores()
    numbers = dict.fromkeys(count or cores for count in _parse_numbers("--threads", threads, 0, 1024))
    sides = _parse_numbers("--px", px, 8, 4096)
    indexes = [_open(path) for path in data]
    crops = "centre crops" if validation else f"random crops from {min_scale:g} of the area"
    print(f"{crops}, batches of {batch}, {cores} cores, decoder {decode.NAME}\n{_HEAD}", flush=True)
    for (path, index), side, count in product(zip(data, indexes, strict=True), sides, numbers):
        print(_line(path, count, side, _measure(index, count, side, batch, min_scale, validation, seconds)), flush=True)


def _open(path: Path) -> "Index":
    """The training images below `path`, or those of the split that `path` itself is."""
    from fortyfold.data.splits import find_splits, open_folder

    splits = find_splits(path)
    with bar(f"indexing {path}") as report:
        return open_folder(splits.get("train") or next(iter(splits.values())), progress=report)


def _measure(
    index: "Index", threads: int, px: int, batch: int, min_scale: float, validation: bool, seconds: float
) -> "Speed":
    from fortyfold.data.reader import Reader
    from fortyfold.data.speed import endless_centres, endless_crops, measure

    centres, crops = endless_centres(index, batch, px, 0.875), endless_crops(index, batch, px, min_scale)
    return measure(Reader(threads), centres if validation else crops, seconds)


def _line(path: Path, threads: int, px: int, speed: "Speed") -> str:
    name = str(path) if len(str(path)) <= 24 else f"…{str(path)[-23:]}"
    busy = sum(speed.stages) or 1.0
    read, decode, resize = (f"{100 * stage / busy:.0f} %" for stage in speed.stages)
    reached = f"{100 * speed.images_per_second / speed.limit_images_per_second:.0f} %"
    python = f"{1e6 * speed.python_seconds_per_image:.0f} µs/img"
    return (
        f"{name:<24} {threads:>7} {px:>5} {speed.images_per_second:>8.0f} {reached:>8}  "
        f"{read:>5} {decode:>6} {resize:>6} {python:>10}"
    )


def _parse_numbers(option: str, text: str, low: int, high: int) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text) or not all(low <= int(part) <= high for part in text.split(",")):
        raise UserError(f"{option} {text}: give numbers from {low} to {high}, as in {option} 1,2")
    return [int(part) for part in text.split(",")]
