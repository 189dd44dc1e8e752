"""`fortyfold data shard`"""

import re
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fortyfold.cli.bars import bar
from fortyfold.spec.errors import UserError

if TYPE_CHECKING:
    from fortyfold.data.index import Index

_NAMED = 10  # unreadable images that are named in the terminal


class Tile(StrEnum):
    auto = "auto"
    always = "always"
    never = "never"


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
    from fortyfold.data.splits import find_splits, open_folder

    numbers = _parse_part(part)
    for split, place in find_splits(source).items():
        with bar(f"indexing {place}") as report:
            index = open_folder(place, progress=report)
        _shard_split(index, target / split, shard_mb, shards, tile.value, numbers, threads or available_cores())


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
    for name, reason in unreadable[:_NAMED]:
        print(f"  kept as it is, since it cannot be read: {name} ({reason})")
    if len(unreadable) > _NAMED:
        print(f"  and {len(unreadable) - _NAMED} more")


def _parse_part(part: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--part {part}: give I/N with I from 1 to N, as in --part 2/8")
    return int(match[1]) - 1, int(match[2])
