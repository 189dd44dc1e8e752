"""Several ranks on this host, through torchrun; the workers are stand-ins. Each start of torchrun takes seconds."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fortyfold.launch import attempt
from fortyfold.launch.local import run_local
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag

HERE = Path(__file__).parent
START_SECONDS = 60.0  # of torchrun, on a busy machine
MOST_SECONDS_TO_END = 10.0


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a killed torchrun leaves a folder there
    return RunDir(tmp_path / 'a run\'s "own" $HOME; place')


def launch(run_dir: RunDir, *acts: list[str], stop: StopFlag | None = None) -> tuple[int, str, list[str]]:
    """Run a stand-in a rank; gives the number of attempts, what was unsaved, and the notes."""
    notes: list[str] = []
    try:
        plan = job(run_dir, list(acts))
        ended = run_local(run_dir, plan, len(acts), stop or StopFlag(), module="stand_in", say=notes.append)
    finally:
        assert not alive(run_dir)
    return ended.num_attempts, ended.unsaved, notes


def job(run_dir: RunDir, acts: list[list[str]]) -> dict[str, Any]:
    return {"run": str(run_dir.path), "acts": acts}


def diaries(run_dir: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(run_dir.path.glob("rank-*")) for line in file.read_text().splitlines()]


def alive(run_dir: RunDir) -> list[int]:
    """The workers that are still there, of all attempts."""
    return [diary["process"] for diary in diaries(run_dir) if is_alive(diary["process"])]


def is_alive(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_workers_that_end_well_on_the_second_port(
    run_dir: RunDir, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir.path.mkdir()
    run_dir.stop_request.write_text("an old one")
    with socket.create_server(("", 0)) as other:
        ports = iter([other.getsockname()[1], attempt.free_port()])
        monkeypatch.setattr(attempt, "free_port", lambda: next(ports))
        assert launch(run_dir, ["wait:0"], ["wait:0"]) == (1, "", [])
    assert not run_dir.stop_request.exists()
    first, second = diaries(run_dir)
    assert (first["RANK"], second["RANK"], second["WORLD_SIZE"]) == ("0", "1", "2")
    assert first["GLOO_SOCKET_IFNAME"] == "lo" and int(first["OMP_NUM_THREADS"]) >= 1 and first["GOMP_SPINCOUNT"]
    assert "TORCH_CPP_LOG_LEVEL" not in first and "FORTYFOLD_PARENT" not in first
    out, err = capfd.readouterr()
    assert out == "" and sorted(err.splitlines()) == ["rank 0 prints", "rank 1 prints"]


def test_a_killed_rank_then_an_exception_that_comes_again(run_dir: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    """The first attempt leaves one rank deaf and one frozen; the second gets on before it fails, the third does not."""
    notes: list[str] = []
    times: list[float] = []

    def note(text: str) -> None:
        notes.append(text)
        times.append(time.time())

    fails = ["meet: wait:0.5 kill:9", "meet: save:3 raise:no_luck", "meet: raise:no_luck"]
    acts = [["hang:", "wait:60"], fails, ["stop:", "wait:60"]]
    with pytest.raises(RunFailed, match=r"^rank 1 failed: ValueError: no luck; its traceback is above$"):
        run_local(run_dir, job(run_dir, acts), 3, StopFlag(), module="stand_in", say=note)
    assert notes == [
        "note: rank 1 was killed by SIGKILL; starting again from the beginning (attempt 2)",
        "note: rank 1 failed: ValueError: no luck; starting again from the last checkpoint (attempt 3)",
    ]
    assert not alive(run_dir) and len(diaries(run_dir)) == 9
    met = max(diary["time"] for diary in diaries(run_dir)[::3])  # when the last rank of the first attempt came
    assert times[0] - met - 0.5 < MOST_SECONDS_TO_END
    out, err = capfd.readouterr()
    assert out == "" and err.count("Traceback") == 1 and "torch" not in err


def test_bad_input_ends_the_run(run_dir: RunDir) -> None:
    with pytest.raises(UserError, match=r"^no model 'x'; did you mean y\?$"):
        launch(run_dir, ["user:no_model_'x';_did_you_mean_y?"], ["wait:60"])


def test_a_stop_is_passed_on_and_obeyed(run_dir: RunDir) -> None:
    stop = StopFlag()
    stop.ask(signal.SIGUSR1)
    assert launch(run_dir, ["obey:"], ["obey:"], stop=stop) == (1, "", [])
    assert json.loads(run_dir.stopped.read_text()) == {"signal": "SIGUSR1", "reason": "out of time"}


def test_a_killed_launcher_leaves_no_worker(run_dir: RunDir) -> None:
    program = (
        "import json, sys; from pathlib import Path; from fortyfold.launch.local import run_local;"
        "from fortyfold.spec.run_dir import RunDir; from fortyfold.spec.stop import StopFlag;"
        "job = json.loads(sys.argv[1]);"
        "run_local(RunDir(Path(job['run'])), job, 2, StopFlag(), module='stand_in')"
    )
    job_text = json.dumps(job(run_dir, [["hang:"], ["stop:"]]))
    with subprocess.Popen([sys.executable, "-c", program, job_text], stderr=subprocess.DEVNULL) as launcher:
        try:
            wait_until(lambda: len(alive(run_dir)) == 2, START_SECONDS)
        finally:
            launcher.kill()
    wait_until(lambda: not alive(run_dir), MOST_SECONDS_TO_END)
