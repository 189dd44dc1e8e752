"""Progress bars for long work: a bar in a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 10.0

Report = Callable[[int, int], None]  # how many are done, of how many


@contextmanager
def bar(title: str, check: Callable[[], None] | None = None) -> Iterator[Report]:
    """A function to call with (done, total). Each call also calls `check`, which may raise to stop the work."""
    with _shown(title) as show:

        def report(done: int, total: int) -> None:
            show(done, total)
            if check is not None:
                check()

        yield report


@contextmanager
def _shown(title: str) -> Iterator[Report]:
    if sys.stdout.isatty():
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, transient=True) as progress:
            task = progress.add_task(title, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
    else:
        yield _lines(title)


def _lines(title: str) -> Report:
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            print(f"{title}: {done} of {total}", flush=True)

    return report
