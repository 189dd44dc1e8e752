"""Where a run's figures go besides its directory. A sink is a file here with `open_sink(run_dir, recipe) -> Sink`.

Sinks read the run directory (metrics/points.py), in a process of their own: a sink can be attached to a run while it
goes on or afterwards, and training notices neither its speed nor its failure. One process at a time writes a sink of
a run. Opening a sink begins it anew: what an earlier process wrote is replaced, so no step is in it twice.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

from fortyfold.metrics.points import Point, PointReader, Replayed
from fortyfold.spec import plugin
from fortyfold.spec.errors import UserError
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.recipe_file import parse_recipe, set_key
from fortyfold.spec.run_dir import RunDir

POLL_SECONDS = 1.0
LOCK_PATIENCE_SECONDS = 5.0


class Sink(Protocol):
    place: str
    """Where to look: a line for the user."""

    def write(self, points: list[Point]) -> None:
        """Take the next points, in the order of examples seen. When it returns, a reader can have them soon."""

    def close(self) -> None:
        """Everything is written, or sent, when it returns."""


def require_sinks(names: tuple[str, ...]) -> None:
    """Refuse names that no sink has."""
    for name in names:
        plugin.require(__name__, name)


def write_run(name: str, run_dir: RunDir, changes: Mapping[str, Any], goes_on: Callable[[], bool]) -> str | None:
    """Write the sink `name` of a run from its start to where the run is, and on for as long as `goes_on()`.

    `changes` are keys below `log` that differ from the run's recipe. Gives the place to look; None when the run was
    moved away meanwhile.
    """
    run_dir.read_spec()  # a folder that is no run gets no lock
    open_sink = _load(name)
    with _alone(run_dir.sink_lock(name), goes_on) as is_here:
        while is_here():
            recipe, num_images = _read_recipe(run_dir, changes)
            reader = PointReader(run_dir, recipe, num_images)
            with closing(open_sink(run_dir, recipe)) as sink:
                try:
                    return sink.place if _follow(reader, sink, goes_on, is_here) else None
                except Replayed:
                    continue
        return None


def _follow(reader: PointReader, sink: Sink, goes_on: Callable[[], bool], is_here: Callable[[], bool]) -> bool:
    while True:
        last_round = not goes_on()  # asked first: what was written until then is in the last round
        points = reader.poll(to_the_end=last_round)
        if not is_here():  # or it may be another run that was read, and would be written to
            return False
        sink.write(points)
        if last_round and not reader.is_behind:
            return True
        if not reader.is_behind:
            time.sleep(POLL_SECONDS)


def _load(name: str) -> Callable[[RunDir, Recipe], Sink]:
    try:
        open_sink: Callable[[RunDir, Recipe], Sink] = plugin.load(__name__, name).open_sink
    except ModuleNotFoundError as error:
        package = (error.name or name).partition(".")[0]
        raise UserError(f"{package} is not installed; pip install 'fortyfold[{name}]'") from None
    return open_sink


def _read_recipe(run_dir: RunDir, changes: Mapping[str, Any]) -> tuple[Recipe, int]:
    """The run's recipe with `changes`, and how many training images it has."""
    spec = run_dir.read_spec()
    for key, value in changes.items():
        if not key.startswith("log."):
            raise UserError(f"--set {key}: only keys below log concern a sink")
        set_key(spec["recipe"], key, value)
    origins = {key: f"--set {key}" for key in changes}
    return parse_recipe(spec["recipe"], source=str(run_dir.spec), origins=origins), spec["data"]["train"]["images"]


@contextmanager
def _alone(lock: Path, goes_on: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """Wait for another process that writes the sink, as long as `goes_on()` and a little longer.

    Gives a function that tells whether the run is still where it was.
    """
    lock.parent.mkdir(exist_ok=True)
    with lock.open("ab") as file:
        deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
        while not _take(file.fileno()):
            if goes_on():
                deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
            elif time.monotonic() > deadline:
                raise UserError(
                    f"another process writes the sink {lock.stem} of {lock.parent.parent}; let it end first"
                )
            time.sleep(POLL_SECONDS / 10)
        yield lambda: lock.exists() and os.path.samestat(os.fstat(file.fileno()), lock.stat())


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
