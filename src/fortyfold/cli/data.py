"""`fortyfold data …`"""

import re
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fortyfold.cli.bars import bar
from fortyfold.spec.errors import UserError

if TYPE_CHECKING:
    from fortyfold.data.index import Index

app = typer.Typer(help="Make, look at and prepare data sets.", no_args_is_help=True)


class Tile(StrEnum):
    auto = "auto"
    always = "always"
    never = "never"


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
    from fortyfold.data.splits import SPLIT_FOLDERS, find_split, open_folder

    for split in SPLIT_FOLDERS:
        place = find_split(folder, split)
        started = time.perf_counter()
        with bar(f"indexing {split}") as report:
            found = open_folder(place, fresh=fresh, progress=report)
        seconds = time.perf_counter() - started
        print(f"{split:<5} {len(found)} images, {len(found.classes)} classes, {place} ({seconds:.1f} s)")


@app.command()
def shard(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder with train/ and val/, or a folder a class.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Where train/ and val/ with the shards are made.")],
    shard_mb: Annotated[int, typer.Option(min=1, help="About so large is a shard.")] = 256,
    shards: Annotated[int, typer.Option(min=0, help="How many shards a split has, instead of --shard-mb.")] = 0,
    tile: Annotated[
        Tile, typer.Option(help="Tile JPEGs losslessly, so that crops decode alone; auto: large ones.")
    ] = Tile.auto,
    part: Annotated[
        str, typer.Option(metavar="I/N", help="Make only the I-th of N parts, 1 to N: for job arrays.")
    ] = "1/1",
    threads: Annotated[int, typer.Option(min=0, help="0: one a core.")] = 0,
) -> None:
    """Make shards: WebDataset tar files, and an index for random access. The same command goes on after a kill."""
    from fortyfold.data.cores import available_cores
    from fortyfold.data.splits import find_all, open_folder

    numbers = _parse_part(part)
    for split, place in find_all(source).items():
        with bar(f"indexing {place}") as report:
            index = open_folder(place, progress=report)
        _shard_split(index, target / split, shard_mb, shards, tile.value, numbers, threads or available_cores())


STREAMS = 4


@app.command()
def stage(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Sharded data: train/ and val/ with shards.index.")],
    scratch: Annotated[Path, typer.Argument(metavar="SCRATCH", help="Folder on this node's own disk.")],
    streams: Annotated[int, typer.Option(min=1, max=64, help="Shards that are copied at once.")] = STREAMS,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read what is there again, and copy the damaged anew.")
    ] = False,
) -> None:
    """Copy sharded data to this node's own disk, once for all its jobs. The same command goes on after a kill.

    Nothing is ever evicted: you, or your job's epilogue, remove SCRATCH.
    """
    stage_data(source, scratch, streams, verify)


def _shard_split(
    index: "Index", folder: Path, shard_mb: int, num_shards: int, tile: str, part: tuple[int, int], threads: int
) -> None:
    from fortyfold.data import decode
    from fortyfold.data.prepare.shard import Sharding, count_shards, make_shards, source_sizes
    from fortyfold.data.prepare.work import in_words
    from fortyfold.data.shards import read_head

    if tile == "auto" and not decode.is_native():
        tile = "never"
        print("not tiled: the native decoder was not built")
    started = time.perf_counter()
    source_bytes = source_sizes(index, threads)
    num_shards = num_shards or count_shards(source_bytes, shard_mb * 10**6, len(index))
    if num_shards > len(index):
        raise UserError(f"--shards {num_shards}: {index.folder} has only {len(index)} images")
    with bar(f"sharding {index.folder}") as report:
        outcome = make_shards(Sharding(index, num_shards, tile), folder, part, threads, source_bytes, report)
    seconds = time.perf_counter() - started
    if outcome.num_missing:
        print(f"{folder}: part {part[0] + 1}/{part[1]} is there; {outcome.num_missing} shards of other parts are not")
        return
    head = read_head(folder)
    total = sum(entry["num_bytes"] for entry in head["shards"])
    how = f"made in {seconds:.1f} s" if outcome.num_made else "already there"
    print(f"{folder}: {len(index)} images, {in_words(total)} in {num_shards} shards ({how})")
    unreadable = head["source"]["unreadable"]
    for name, reason in unreadable[:10]:
        print(f"  kept as it is, since it cannot be read: {name} ({reason})")
    if len(unreadable) > 10:
        print(f"  and {len(unreadable) - 10} more")


def _parse_part(part: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--part {part}: give I/N with I from 1 to N, as in --part 2/8")
    return int(match[1]) - 1, int(match[2])


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


def stage_data(
    source: Path, scratch: Path, streams: int = STREAMS, verify: bool = False, check: Callable[[], None] | None = None
) -> Path:
    """Stage, and say what was copied; gives the copy's place. `check` is called often and may raise to stop."""
    from fortyfold.data.prepare.work import in_words
    from fortyfold.data.stage import stage

    with bar(f"staging {source} (MB)", check) as report:
        staged = stage(
            source, scratch, streams, lambda done, total: report(done // 10**6, total // 10**6),
            verify=verify, say=lambda line: print(line, flush=True),
        )  # fmt: skip
    speed = f" ({staged.copied_bytes / 1e6 / staged.seconds:.0f} MB/s)" if staged.num_copied else ""
    copied = f"{in_words(staged.copied_bytes)} in {staged.num_copied} shards"
    print(f"staged {copied} to {staged.root}{speed}, {in_words(staged.there_bytes)} were there", flush=True)
    return staged.root


def _parse_px(px: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", px)
    if not match or min(sides := [int(side) for side in match.groups(match[1])]) < 16 or max(sides) > 8192:
        raise UserError(f"--px {px}: give a side from 16 to 8192, as in --px 96, or both, as in --px 500x375")
    return sides[0], sides[1]
