"""`fortyfold data stage`, and the same for a recipe with data.stage."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fortyfold.cli.bars import bar

if TYPE_CHECKING:
    from fortyfold.data.stage import Staged

STREAMS = 4


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


def stage_data(
    source: Path, scratch: Path, streams: int = STREAMS, verify: bool = False, check: Callable[[], None] | None = None
) -> "Staged":
    """Stage, and say what was copied; gives the copy. `check` is called often and may raise to stop."""
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
    return staged
