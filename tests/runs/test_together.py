"""Several ranks through the command line: stopping and going on, a second command, a worker that dies."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import kill_resume
import pytest
from conftest import start

from fortyfold.data.demo import DemoSpec, make_demo
from fortyfold.launch import local
from fortyfold.spec.events import Event, read_events
from fortyfold.spec.failure import Ending, Failure
from fortyfold.spec.records import read_steps
from fortyfold.spec.run_dir import RunDir

PATIENCE_SECONDS = 180.0
MOST_SECONDS_TO_END = 10.0
NUM_STEPS = 180  # and then an evaluation
CHANGES = ("global_batch=8", "evaluate.every_epochs=60", "checkpoint.every_epochs=30")
OPTIONS = ("--epochs", 60, *(part for change in CHANGES for part in ("--set", change)))
# Python reads it when it starts. Rank 1 takes two steps, and fails in the third.
SABOTAGE = """
import os
if os.environ.get("RANK") == "1":
    from fortyfold.engine.learner import Learner
    update = Learner.update
    def fail(learner, step):
        if step == 3:
            raise ValueError("no luck")
        update(learner, step)
    Learner.update = fail
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 training images, and 4 validation images three thousand times, so that evaluating takes seconds."""
    root = tmp_path_factory.mktemp("together") / "data"
    make_demo(root, DemoSpec(classes=4, images=28, width=48, height=48, seed=0))
    for image in sorted((root / "val").rglob("*.jpg")):
        for number in range(3000):
            os.link(image, image.with_name(f"{number:04d}-{image.name}"))
    (root / "made.json").unlink()
    return root


@contextmanager
def training(run_dir: RunDir, data: Path, **options: object) -> Iterator["subprocess.Popen[str]"]:
    with start("train", "tiny", "--procs", 2, "--data", data, "--out", run_dir.path, *OPTIONS, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(holds: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def events_of(run_dir: RunDir, kind: str, rank: int = 0) -> list[Event]:
    return [event for event in read_events(run_dir.events(rank)) if event["kind"] == kind]


@pytest.fixture(scope="module")
def calm(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Trained to its end, disturbed only by a second command of the same kind, which is refused."""
    run_dir = RunDir(tmp_path_factory.mktemp("calm") / "run")
    with training(run_dir, data) as first:
        wait_until(lambda: events_of(run_dir, "started"), first)
        with training(run_dir, data) as second:
            out, err = second.communicate(timeout=PATIENCE_SECONDS)
        assert second.returncode == 2 and err.count("\n") == 1, err
        assert f"is being trained by process {first.pid} on" in err
        assert not run_dir.stop_request.exists()
        out, err = first.communicate(timeout=PATIENCE_SECONDS)
    assert (first.returncode, err) == (0, ""), out
    assert len(events_of(run_dir, "started")) == len(events_of(run_dir, "finished")) == 1
    return run_dir


def cancel(run_dir: RunDir, data: Path, when: Callable[[], object]) -> int:
    """Train, send SIGINT as soon as `when` says so, and see that it is obeyed; gives the step it stopped after."""
    with training(run_dir, data) as process:
        wait_until(lambda: run_dir.is_locked() and when(), process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, err) == (75, ""), out
    marker = json.loads(run_dir.stopped.read_text())
    assert (marker["reason"], marker["signal"]) == ("cancelled", "SIGINT")
    assert f"stopped (cancelled) after step {marker['step']}, saved" in out
    assert run_dir.checkpoint_names()[0].startswith(f"step-{marker['step']:09d}-")
    assert not run_dir.is_locked()
    return int(marker["step"])


def test_ctrl_c_while_starting_and_evaluating(calm: RunDir, data: Path, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")

    def num_steps() -> int:
        return len(read_steps(run_dir.steps())) if run_dir.steps().exists() else 0

    cancel(run_dir, data, when=lambda: True)
    assert cancel(run_dir, data, when=lambda: num_steps() == NUM_STEPS) == NUM_STEPS
    assert not events_of(run_dir, "evaluated") and len(events_of(run_dir, "started")) == 2
    with training(run_dir, data) as process:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, err) == (0, ""), out
    assert kill_resume.fingerprint(run_dir) == kill_resume.fingerprint(calm)
    scores = [[event["step"], event["top1"], event["num_images"]] for event in events_of(run_dir, "evaluated")]
    assert scores == [[event["step"], event["top1"], event["num_images"]] for event in events_of(calm, "evaluated")]


def test_a_worker_that_dies_ends_all_and_is_named_once(data: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    run_dir = RunDir(tmp_path / "run")
    with training(run_dir, data, env={**os.environ, "PYTHONPATH": path}) as process:
        wait_until(lambda: events_of(run_dir, "failed", rank=1), process)
        failed_at, other = events_of(run_dir, "failed", rank=1)[0]["time"], events_of(run_dir, "started")[0]["process"]
        while Path("/proc", str(other)).exists():
            assert time.time() < failed_at + MOST_SECONDS_TO_END
            time.sleep(0.02)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert err.count("Traceback") == err.count("in fail") == 1, err
    log = run_dir.rank_log(1)
    expected = f"rank 1 failed: ValueError: no luck; its traceback is above and in {log}"
    assert err.splitlines()[-1].endswith(expected), err


def test_a_rank_is_killed_before_it_has_begun_and_somebody_has_asked_to_stop(
    tiny_data: Path, tmp_path: Path, fortyfold: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path / "run")

    def attempt(*arguments: object) -> Ending:
        run_dir.stop_request.write_text('{"signal": "SIGTERM"}')
        return Ending((Failure(1, "killed", "was killed by SIGKILL"),))

    monkeypatch.setattr(local, "run_attempt", attempt)
    code, out, err = fortyfold("train", "tiny", "--data", tiny_data, "--out", run_dir.path, "--procs", 2)
    assert (code, err) == (75, "")
    assert "stopped (terminated; rank 1 was killed by SIGKILL) after step 0; the same command starts again" in out
