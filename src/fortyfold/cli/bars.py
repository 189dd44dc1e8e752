"""Progress bars for long work: a bar in a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fortyfold.data.prepare.work import in_words

LINE_SECONDS = 10.0

Report = Callable[[int, int], None]  # how many are done, of how many


@contextmanager
def bar(title: str, check: Callable[[], None] | None = None, *, in_bytes: bool = False) -> Iterator[Report]:
    """A function to call with (done, total), of things or `in_bytes`. Each call also calls `check`, which may
    raise to stop the work."""
    with _shown(title, in_bytes) as show:

        def report(done: int, total: int) -> None:
            show(done, total)
            if check is not None:
                check()

        yield report


@contextmanager
def _shown(title: str, in_bytes: bool) -> Iterator[Report]:
    if sys.stdout.isatty():
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn() if in_bytes else MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, transient=True) as progress:
            task = progress.add_task(title, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
    else:
        yield _lines(title, in_words if in_bytes else str)


def _lines(title: str, amount: Callable[[int], str]) -> Report:
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            print(f"{title}: {amount(done)} of {amount(total)}", flush=True)

    return report
