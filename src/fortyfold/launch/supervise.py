"""Attempt after attempt, until a run is trained, stopped, or cannot go on. The same for one node and for many.

A rank that was killed, lost, or is gone without a word is nobody's mistake: the next attempt goes on from the last
checkpoint, unless MOST_IDLE_ATTEMPTS in a row have saved nothing new. After a Python exception that holds only if the
attempt got on before; else it would come again. Bad input and a run that failed by its own account end it at once.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from fortyfold.launch.culprit import find_culprit, tell
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.events import last_attempt, read_events
from fortyfold.spec.failure import Ending, Failure
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag, read_request, write_request

MOST_IDLE_ATTEMPTS = 3

Attend = Callable[[], None]
Attempt = Callable[[Attend], Ending]
"""Runs all ranks to their end. It calls what it is given about ten times a second."""


@dataclass(frozen=True)
class Ended:
    """The ranks are gone, and there is nothing to complain of. The run directory says whether it is trained."""

    num_attempts: int
    unsaved: str = ""
    """Asked to stop, ranks failed instead of saving: how, in a line. An earlier checkpoint holds."""


@contextmanager
def taking_over(run_dir: RunDir, *, keep_cancelled: bool = False) -> Iterator[None]:
    """Hold the run for this command, attempt after attempt; what was asked of an earlier one is forgotten.

    Between two attempts nobody else takes it over, and a request to stop it is never meant for somebody else's ranks.
    With `keep_cancelled` a cancellation holds: a job may be cancelled while it is queued, or queued again.
    A UserError if somebody trains in it.
    """
    with run_dir.hold_launch():
        with run_dir.hold():
            if not (keep_cancelled and read_request(run_dir) == signal.SIGINT):
                run_dir.stop_request.unlink(missing_ok=True)
        yield


def supervise(run_dir: RunDir, attempt: Attempt, stop: StopFlag, say: Callable[[str], object] = print) -> Ended:
    """Run ranks until the run ends; no process is left. It must have been taken over.

    A requested stop is passed on as a file; the workers then save and exit by themselves. Raises UserError and
    RunFailed as the worker did, and RunFailed when starting again has no point.
    """
    forward = _Forward(run_dir, stop)
    idle, furthest = 0, run_dir.saved_steps()
    for count in range(1, sys.maxsize):
        ending = attempt(forward)
        if ending == Ending():
            return Ended(count)
        saved = run_dir.saved_steps()
        got_on = saved is not None and (furthest is None or saved > furthest)
        idle, furthest = (0, saved) if got_on else (idle + 1, furthest)
        stopping = stop.requested or run_dir.stop_request.exists()
        what = require_hope(run_dir, ending, idle, stopping)
        if stopping:
            say(f"note: {what} while the run was to stop; it stops without saving, the last checkpoint holds")
            return Ended(count, unsaved=what)
        where = "from the last checkpoint" if saved is not None else "from the beginning"
        say(f"note: {what}; starting again {where} (attempt {_next_attempt(run_dir, count)})")
    raise AssertionError


class _Forward:
    """Writes the stop request into the run directory, once, when this process was asked to stop; unless there is one,
    which may be somebody's who does not want it to go on."""

    def __init__(self, run_dir: RunDir, stop: StopFlag) -> None:
        self._run_dir, self._stop, self._done = run_dir, stop, False

    def __call__(self) -> None:
        if not self._stop.requested or self._done:
            return
        with suppress(OSError):  # a full disk: the next call tries again; ending the ranks would save nothing
            if not self._run_dir.stop_request.exists():
                write_request(self._run_dir, self._stop)
            self._done = True


def require_hope(run_dir: RunDir | None, ending: Ending, idle: int, stopping: bool) -> str:
    """What happened, in a line, if another attempt may fare better; else an error."""
    culprit = find_culprit(ending)
    what = tell(culprit, ending)
    if culprit is not None and culprit.kind == "UserError":
        raise UserError(what)
    if culprit is not None and culprit.kind == "RunFailed":
        raise RunFailed(what)
    if culprit is not None and culprit.kind == "exception" and (idle or stopping):
        print(culprit.traceback, file=sys.stderr, flush=True)
        raise RunFailed(f"{what}; its traceback is above{_logged(run_dir, culprit)}")
    if idle >= MOST_IDLE_ATTEMPTS and not stopping:
        raise RunFailed(f"{what}; {idle} attempts in a row have saved nothing new; the same command tries again")
    return what


def _logged(run_dir: RunDir | None, culprit: Failure) -> str:
    return f" and in {run_dir.rank_log(culprit.rank)}" if run_dir and run_dir.rank_log(culprit.rank).exists() else ""


def _next_attempt(run_dir: RunDir, count: int) -> int:
    """The number that the next attempt will have; one that was killed before it began to write has none."""
    return max(last_attempt(read_events(run_dir.events())), count) + 1
