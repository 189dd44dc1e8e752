"""A run of several ranks on this host: attempt after attempt, until it is trained, stopped, or cannot go on.

A rank that was killed, lost, or is gone without a word is nobody's mistake: the next attempt goes on from the last
checkpoint, unless MOST_IDLE_ATTEMPTS in a row have saved nothing new. After a Python exception that holds only if the
attempt got on before; else it would come again. Bad input and a run that failed by its own account end it at once.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fortyfold.launch.attempt import run_attempt
from fortyfold.launch.culprit import find_culprit, tell
from fortyfold.launch.environment import worker_environment
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.events import last_attempt, read_events
from fortyfold.spec.failure import Ending, Failure
from fortyfold.spec.run_dir import RunDir, write_json
from fortyfold.spec.stop import StopFlag

MOST_IDLE_ATTEMPTS = 3
WORKER = "fortyfold.api.worker"


@dataclass(frozen=True)
class Ended:
    """The ranks are gone, and there is nothing to complain of. The run directory says whether it is trained."""

    num_attempts: int
    unsaved: str = ""
    """Asked to stop, ranks failed instead of saving: how, in a line. An earlier checkpoint holds."""


def run_once(job: dict[str, Any], procs: int, attend: Callable[[], None]) -> None:
    """Run workers for work that is done in one go; a failure is an error, and nothing is tried again."""
    ending = run_attempt(WORKER, procs, worker_environment(job, procs), attend)
    if ending != Ending():
        raise RunFailed(_require_hope(None, ending, idle=1, stopping=False))


def run_local(
    run_dir: RunDir,
    job: dict[str, Any],
    procs: int,
    stop: StopFlag,
    *,
    module: str = WORKER,
    say: Callable[[str], object] = print,
) -> Ended:
    """Run `procs` workers (`python -m module`, the job in FORTYFOLD_JOB) until the run ends; no process is left.

    A requested stop is passed on as a file; the workers then save and exit by themselves. Raises UserError and
    RunFailed as the worker did, and RunFailed when starting again has no point. The run is held all the time: between
    two attempts nobody else takes it over, and a request to stop it is never meant for somebody else's ranks.
    """
    with run_dir.hold_launch():
        _forget_stop_request(run_dir)
        return _run(run_dir, job, procs, stop, module, say)


def _run(
    run_dir: RunDir, job: dict[str, Any], procs: int, stop: StopFlag, module: str, say: Callable[[str], object]
) -> Ended:
    environment = worker_environment(job, procs)
    forward = _Forward(run_dir, stop)
    idle, furthest = 0, run_dir.saved_steps()
    for count in range(1, sys.maxsize):
        ending = run_attempt(module, procs, environment, forward)
        if ending == Ending():
            return Ended(count)
        saved = run_dir.saved_steps()
        got_on = saved is not None and (furthest is None or saved > furthest)
        idle, furthest = (0, saved) if got_on else (idle + 1, furthest)
        stopping = stop.requested or run_dir.stop_request.exists()
        what = _require_hope(run_dir, ending, idle, stopping)
        if stopping:
            say(f"note: {what} while the run was to stop; it stops without saving, the last checkpoint holds")
            return Ended(count, unsaved=what)
        where = "from the last checkpoint" if saved is not None else "from the beginning"
        say(f"note: {what}; starting again {where} (attempt {_next_attempt(run_dir, count)})")
    raise AssertionError


class _Forward:
    """Writes the stop request into the run directory, once, when this process was asked to stop."""

    def __init__(self, run_dir: RunDir, stop: StopFlag) -> None:
        self._run_dir, self._stop, self._done = run_dir, stop, False

    def __call__(self) -> None:
        if self._stop.signal is None or self._done:
            return
        with suppress(OSError):  # a full disk: the next call tries again; ending the ranks would save nothing
            write_json(self._run_dir.stop_request, {"signal": self._stop.signal.name})
            self._done = True


def _forget_stop_request(run_dir: RunDir) -> None:
    """An old request is for an old attempt. A UserError if somebody trains who needs no launcher; his request stays."""
    with run_dir.hold():
        run_dir.stop_request.unlink(missing_ok=True)


def _require_hope(run_dir: RunDir | None, ending: Ending, idle: int, stopping: bool) -> str:
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
