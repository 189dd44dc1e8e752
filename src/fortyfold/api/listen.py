"""Tells a caller of a run's events while it goes on, by following its directory: the loop has no callbacks."""

import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fortyfold.spec.beside import beside
from fortyfold.spec.events import Event
from fortyfold.spec.ranks import MergedEventReader
from fortyfold.spec.run_dir import RunDir

POLL_SECONDS = 0.2

OnEvent = Callable[[Event], object]


@contextmanager
def listening(run_dir: RunDir, on_event: OnEvent | None) -> Iterator[None]:
    """Call `on_event` for each event from now on, in a thread of its own; all were heard when the context is left.

    A call that raises is warned about, and the last one: training goes on.
    """
    if on_event is None:
        yield
        return
    reader = MergedEventReader(run_dir)
    reader.poll()  # what was before is no news

    def follow(over: threading.Event) -> None:
        last_round = False
        while not last_round:
            last_round = over.wait(POLL_SECONDS)
            for event in reader.poll():
                on_event(event)

    problems: list[str] = []

    def guarded(over: threading.Event) -> None:
        try:
            follow(over)
        except Exception:
            problems.append(traceback.format_exc())

    try:
        with beside("events", guarded):
            yield
    finally:
        if problems:
            warnings.warn(f"on_event raised, and heard no more events:\n{problems[0]}", RuntimeWarning, stacklevel=4)
