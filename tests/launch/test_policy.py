"""Whether a run is started again, and what is said: no process is started here."""

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fortyfold.launch import attempt, local
from fortyfold.launch.culprit import find_culprit
from fortyfold.launch.environment import worker_environment
from fortyfold.launch.local import run_local
from fortyfold.launch.supervise import MOST_IDLE_ATTEMPTS, Ended, taking_over
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.failure import Ending, Failure, name_ranks
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag, write_request

KILLED = Failure(1, "killed", "was killed by SIGKILL", time=5.0, exit_code=-9)
ENDED = Failure(0, "ended", "ended since another rank had failed", time=1.0, exit_code=-15)
CONSEQUENCE = Failure(0, "consequence", "ConnectionError: closed", time=2.0)
RAISED = Failure(2, "exception", "ValueError: no luck", traceback="Traceback: no luck", time=4.0)
LOST = Failure(0, "lost", "rank 3 was lost: no sign of life for 300 s", (3,), time=3.0)
FULL_DISK = Failure(0, "RunFailed", "the disk is full", time=9.0)
Act = Callable[[RunDir], Ending]


def save(step: int, ending: Ending) -> Act:
    def act(run_dir: RunDir) -> Ending:
        (run_dir.checkpoints / f"step-{step:09d}-0001").mkdir(parents=True, exist_ok=True)
        return ending

    return act


def play(
    monkeypatch: pytest.MonkeyPatch, run_dir: RunDir, *acts: Act | Ending, stop: StopFlag | None = None
) -> tuple[Ended, list[str]]:
    """Attempts that end as `acts` say."""
    remaining, notes = list(acts), list[str]()

    def run(module: str, procs: int, environment: Mapping[str, str], attend: Callable[[], None]) -> Ending:
        act = remaining.pop(0)
        return act if isinstance(act, Ending) else act(run_dir)

    monkeypatch.setattr(local, "run_attempt", run)
    ended = run_local(run_dir, {}, 2, stop or StopFlag(), say=notes.append)
    assert not remaining
    return ended, notes


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.mark.parametrize(
    ("failures", "culprit"),
    [
        ([ENDED, CONSEQUENCE, KILLED], KILLED),
        ([ENDED, CONSEQUENCE, RAISED], RAISED),
        ([RAISED, LOST], LOST),
        ([ENDED, CONSEQUENCE], CONSEQUENCE),
        ([KILLED, FULL_DISK], FULL_DISK),
        ([], None),
    ],
)
def test_the_culprit(failures: list[Failure], culprit: Failure | None) -> None:
    assert find_culprit(Ending(tuple(failures))) == culprit


def test_ranks_that_are_lost_start_again(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, notes = play(monkeypatch, run_dir, Ending((ENDED, LOST)), save(2, Ending((CONSEQUENCE,))), Ending())
    assert ended == Ended(3)
    assert notes == [
        "note: rank 3 was lost: no sign of life for 300 s; starting again from the beginning (attempt 2)",
        "note: rank 0 failed: ConnectionError: closed; starting again from the last checkpoint (attempt 3)",
    ]


def test_attempts_without_progress_are_bounded(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = Ending((KILLED,))
    progress = [save(step, killed) for step in range(2 * MOST_IDLE_ATTEMPTS)]
    with pytest.raises(RunFailed, match=r"^rank 1 was killed by SIGKILL; 3 attempts in a row have saved nothing new"):
        play(monkeypatch, run_dir, *progress, killed, save(5, killed), killed)


def test_torchrun_itself_may_be_killed(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    _, notes = play(monkeypatch, run_dir, Ending(trouble="torchrun's process was killed by SIGKILL"), Ending())
    assert notes == ["note: torchrun's process was killed by SIGKILL; starting again from the beginning (attempt 2)"]


@pytest.mark.parametrize(("kind", "error"), [("UserError", UserError), ("RunFailed", RunFailed)])
def test_the_two_errors_come_through(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, kind: str, error: type[Exception]
) -> None:
    failure = Failure.from_json({"rank": 0, "kind": kind, "message": "no model 'x'", "ranks": []})
    with pytest.raises(error, match=r"^no model 'x'$"):
        play(monkeypatch, run_dir, save(3, Ending((ENDED, failure))))


def test_an_exception_names_its_log(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run_dir.rank_log(2)
    log.parent.mkdir(parents=True)
    log.touch()
    with pytest.raises(RunFailed, match=r"^rank 2 failed: ValueError: no luck; .* and in .*rank-00002.log$"):
        play(monkeypatch, run_dir, Ending((RAISED,)))
    assert capsys.readouterr().err == "Traceback: no luck\n"


def test_after_a_stop_nothing_starts_again(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopFlag()
    stop.ask(15)
    ended, notes = play(monkeypatch, run_dir, Ending((KILLED,)), stop=stop)
    assert ended == Ended(1, unsaved="rank 1 was killed by SIGKILL")
    assert len(notes) == 1 and "stops without saving" in notes[0]


def test_a_stop_that_another_process_asked_for(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(run_dir: RunDir) -> Ending:
        run_dir.stop_request.write_text("{}")
        return Ending((KILLED,))

    assert play(monkeypatch, run_dir, asked)[0].unsaved


def test_a_request_for_somebody_elses_run_stays(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir.path.mkdir()
    run_dir.stop_request.write_text("{}")
    for holding in (run_dir.hold, run_dir.hold_launch):
        with holding(), pytest.raises(UserError, match="is being trained by process"):
            play(monkeypatch, run_dir, Ending())
        assert run_dir.stop_request.exists()
    play(monkeypatch, run_dir, Ending())
    assert not run_dir.stop_request.exists()


def test_the_users_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("OMP_NUM_THREADS", "7"), ("GLOO_SOCKET_IFNAME", "eth5"), ("OMP_WAIT_POLICY", "active")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    environment = worker_environment({"text": "ü'\"\n"}, 2)
    assert environment["OMP_NUM_THREADS"] == "7" and environment["GLOO_SOCKET_IFNAME"] == "eth5"
    assert "GOMP_SPINCOUNT" not in environment
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert worker_environment({}, 10_000)["OMP_NUM_THREADS"] == "1"


def test_a_way_there_and_back() -> None:
    ending = Ending((KILLED, LOST, RAISED), "trouble", True)
    assert Ending.from_json(ending.to_json()) == ending
    with pytest.raises(ValueError, match="no kind"):
        Failure.from_json(KILLED.to_json() | {"kind": "else"})


def test_names_of_ranks() -> None:
    assert name_ranks([2]) == "rank 2"
    assert name_ranks((0, 3)) == "ranks 0 and 3"
    assert name_ranks(list(range(40))) == "ranks 0, 1, 2, 3, 4, 5 and 34 more"


def test_no_process_is_left_by_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when torchrun does not even hear SIGTERM: it is still importing, or stopped."""
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    def give_up() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(attempt, "TERMINATE_SECONDS", 0.2)
    monkeypatch.setattr(subprocess, "Popen", Noted)
    with pytest.raises(KeyboardInterrupt):
        attempt.run_attempt("stand_in", 2, worker_environment({}, 2), give_up)
    assert [process.returncode is None for process in started] == [False]


@pytest.mark.parametrize(
    ("program", "trouble"),
    [
        ("exit 3", "torchrun's process ended with exit code 3 and without a word"),
        ("kill -9 $$", "torchrun's process was killed by SIGKILL"),
        ("echo '{'", "torchrun's process ended with exit code 0 and without a word"),
    ],
)
def test_torchrun_without_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, trouble: str) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\n{program}\n")
    interpreter.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    assert attempt.run_attempt("stand_in", 2, {}, lambda: None) == Ending(trouble=trouble)


@pytest.mark.parametrize(("number", "kept"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_job_that_was_cancelled_while_it_was_queued_stays_cancelled(
    run_dir: RunDir, number: signal.Signals, kept: bool
) -> None:
    run_dir.path.mkdir()
    asked = StopFlag()
    asked.ask(number)
    write_request(run_dir, asked)
    with taking_over(run_dir, keep_cancelled=True):
        assert run_dir.stop_request.exists() == kept
    with taking_over(run_dir):
        assert not run_dir.stop_request.exists()
