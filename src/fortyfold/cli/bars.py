"""Progress bars for long work: a bar in a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 10.0

Report = Callable[[int, int], None]  # how many are done, of how many


@contextmanager
def bar(title: str) -> Iterator[Report]:
    """A function to call with (done, total); shows nothing for work that is over at once."""
    if sys.stdout.isatty():
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
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
