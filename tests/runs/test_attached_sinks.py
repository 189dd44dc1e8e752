"""Sinks beside a run: they follow it, outlive its kills, and cannot harm it."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import start
from made_run import MadeRun
from sink_readers import READERS, read_csv

from fortyfold.launch import attach
from fortyfold.spec.records import read_steps
from fortyfold.spec.run_dir import RunDir

Fortyfold = Callable[..., tuple[int, str, str]]


def arguments(data: Path, run_dir: RunDir, sinks: str, *more: object) -> list[object]:
    changes = ("--set", f"log.sinks={sinks}", "--set", "log.every_steps=1", "--set", "log.wandb_offline=true")
    return ["train", "tiny", "--data", data, "--out", run_dir.path, *changes, *more]


def wait_until(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_is_reported_while_it_goes_on(tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    run_dir = RunDir(tmp_path / "run")
    sinks = '["csv", "tensorboard", "wandb"]'
    code, out, err = fortyfold(*arguments(tiny_data, run_dir, sinks, "--epochs", 1))
    assert (code, err) == (0, "") and "note:" not in out
    records = read_steps(run_dir.steps())
    for name, read in READERS.items():
        rows = read(run_dir)
        assert [values["losses/train"] for _, values in rows if "losses/train" in values] == pytest.approx(
            records["loss"].tolist(), rel=1e-6
        )
        assert rows[-1][0] == 250 and "losses/val" in rows[-1][1]
        assert run_dir.sink_log(name).read_text().startswith("written to ")


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("raise ValueError('no such luck')", "failed: ValueError: no such luck"),
        ("import sys; sys.exit(3)", "failed: exit code 3"),
        ("import sys; sys.exit('fortyfold: no key\\nwandb: bye')", "failed: no key (training"),
        ("import time; time.sleep(60)", "did not finish in "),
        (None, "cannot be started: [Errno 2] No such file or directory: '/none'"),
    ],
)
def test_a_sink_that_fails_is_a_line_and_no_more(
    tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch,
    program: str | None, line: str,
) -> None:  # fmt: skip
    command = [sys.executable, "-c", program] if program else ["/none"]
    monkeypatch.setattr(attach, "sink_command", lambda run_dir, name: command)
    monkeypatch.setattr(attach, "PATIENCE_SECONDS", 0.2)
    run_dir = RunDir(tmp_path / "a run")
    code, out, err = fortyfold(*arguments(tiny_data, run_dir, '["csv"]', "--epochs", 1))
    assert (code, err) == (0, "")
    (note,) = [text for text in out.splitlines() if text.startswith("note: the sink")]
    assert note.startswith(f"note: the sink csv {line}")
    assert note.endswith(f"to do it afterwards: fortyfold sink '{run_dir.path}' csv)")
    assert "trained 1 epochs" in out


def test_a_kill_leaves_no_step_twice(tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    run_dir = RunDir(tmp_path / "run")
    command = arguments(tiny_data, run_dir, '["csv"]', "--set", "checkpoint.every_steps=5")
    process = start(*command)
    wait_until(lambda: run_dir.points_csv.exists() and len(read_steps(run_dir.steps())) >= 7, process)
    process.kill()
    process.communicate()
    code, out, err = fortyfold(*command)  # the first attempt's sink may still be there
    assert code == 0, err
    assert "note:" not in out
    examples = [examples for examples, values in read_csv(run_dir) if "losses/train" in values]
    assert examples == read_steps(run_dir.steps())["images"].cumsum().tolist()
    assert len(examples) == 24 and examples[-1] == 750


def test_a_sink_that_follows_ends_with_ctrl_c_or_with_the_run(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    run.steps(0, 12)
    command = ("sink", run.run_dir.path, "csv", "--follow")
    with run.run_dir.hold():
        follower = start(*command)
        wait_until(lambda: run.run_dir.points_csv.exists() and len(read_csv(run.run_dir)) == 2, follower)
        follower.send_signal(signal.SIGINT)
        assert follower.communicate(timeout=30) == (f"written to {run.run_dir.points_csv}\n", "")
        assert follower.returncode == 0
        assert len(read_csv(run.run_dir)) == 3  # with the two steps that fill no window
        follower = start(*command)
        wait_until(lambda: len(read_csv(run.run_dir)) == 2, follower)
        run.steps(12, 20)
    assert follower.communicate(timeout=30)[1] == ""
    assert [examples for examples, _ in read_csv(run.run_dir)] == [40, 80, 120, 192]


def test_an_unknown_sink_is_refused_before_training(tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    code, _, err = fortyfold(*arguments(tiny_data, RunDir(tmp_path / "run"), '["csv", "tensorbord"]'))
    assert code == 2
    assert "no sink 'tensorbord'; there are: csv, tensorboard, wandb; did you mean tensorboard?" in err
    assert not (tmp_path / "run").exists()


def test_a_run_that_does_not_begin_starts_no_sink(tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    run_dir = RunDir(tmp_path / "run")
    assert fortyfold(*arguments(tiny_data, run_dir, "[]", "--epochs", 1))[0] == 0
    code, out, _ = fortyfold(*arguments(tiny_data, run_dir, '["csv"]', "--epochs", 1))
    assert code == 0 and "is trained already" in out
    assert not run_dir.points_csv.exists()
