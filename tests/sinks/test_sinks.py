"""Attaching a sink: one writer at a time, a run that moves, what is missing; and each kind's own ways."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from made_run import MadeRun
from sink_readers import read_csv, read_tensorboard, read_wandb, read_wandb_records

from fortyfold import sinks
from fortyfold.metrics.points import Point, PointReader, Replayed
from fortyfold.sinks import write_run
from fortyfold.sinks.csv import CsvSink
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.run_dir import RunDir, write_json


def attach(name: str, run_dir: RunDir, **log: Any) -> str | None:
    return write_run(name, run_dir, {f"log.{key}": value for key, value in log.items()}, lambda: False)


def test_only_one_process_writes_a_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "LOCK_PATIENCE_SECONDS", 0.1)
    run = MadeRun(tmp_path / "run").finish()
    first_writes, first_ends = threading.Event(), threading.Event()

    def first_goes_on() -> bool:
        first_writes.set()
        first_ends.wait(10)
        return False

    first = threading.Thread(target=write_run, args=("csv", run.run_dir, {}, first_goes_on))
    first.start()
    assert first_writes.wait(10)
    with pytest.raises(UserError, match=rf"another process writes the sink csv of {tmp_path}/run; let it end first"):
        attach("csv", run.run_dir)
    assert attach("tensorboard", run.run_dir)
    goes_on = [True, False]

    def second_goes_on() -> bool:
        first_ends.set()
        return goes_on.pop(0)

    write_run("csv", run.run_dir, {}, second_goes_on)
    first.join()
    assert len(read_csv(run.run_dir)) == 6


def test_a_run_that_was_moved_away_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "POLL_SECONDS", 0.0)
    run = MadeRun(tmp_path / "run").finish()
    calls = iter(range(9))

    def goes_on() -> bool:
        if next(calls) == 1:
            run.run_dir.path.rename(tmp_path / "aside")
            MadeRun(tmp_path / "run").steps(0, 20)
        return True

    assert write_run("csv", run.run_dir, {}, goes_on) is None
    assert not run.run_dir.points_csv.exists()
    assert RunDir(tmp_path / "aside").points_csv.exists()


@pytest.mark.parametrize("replayed", [False, True])
def test_so_it_is_when_that_happens_while_it_is_read(
    replayed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = MadeRun(tmp_path / "run").finish()
    whole = PointReader.poll

    def poll(self: PointReader, **options: Any) -> list[Point]:
        run.run_dir.path.rename(tmp_path / "aside")
        MadeRun(tmp_path / "run").steps(0, 20)
        if replayed:
            raise Replayed
        return whole(self, **options)

    monkeypatch.setattr(PointReader, "poll", poll)
    assert attach("csv", run.run_dir) is None
    assert not run.run_dir.points_csv.exists()


def test_a_csv_that_was_moved_is_written_where_it_is(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    sink = CsvSink(run.run_dir)
    sink.write([Point("steps", 8, 1, 5.0, {"lr": 0.5})])
    run.run_dir.path.rename(tmp_path / "aside")
    sink.write([Point("steps", 16, 2, 6.0, {"lr": 0.25})])
    sink.close()
    assert not run.run_dir.path.exists()
    assert len(read_csv(RunDir(tmp_path / "aside"))) == 2


def test_a_long_run_is_written_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fortyfold.metrics.points.MAX_POINTS", 3)
    run = MadeRun(tmp_path / "run", every_steps=2).finish()
    lengths: list[int] = []
    whole = CsvSink.write

    def write(self: CsvSink, points: list[Point]) -> None:
        lengths.append(len(points))
        whole(self, points)

    monkeypatch.setattr(CsvSink, "write", write)
    attach("csv", run.run_dir)
    assert lengths == [3, 4, 3, 2]  # the second and the last with an evaluation
    seen = [row[0] for row in read_csv(run.run_dir)]
    assert seen == [16, 32, 48, 64, 64, 80, 96, 112, 128, 160, 192, 192]


def test_an_older_run_that_named_no_model_has_sinks_too(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run").finish()
    spec = run.run_dir.read_spec()
    del spec["model"]
    write_json(run.run_dir.spec, spec)
    assert attach("csv", run.run_dir)


def test_only_log_keys_may_differ(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run").finish()
    attach("csv", run.run_dir, every_steps=20)
    assert [row[0] for row in read_csv(run.run_dir)] == [64, 192, 192]
    with pytest.raises(UserError, match="--set epochs: only keys below log concern a sink"):
        write_run("csv", run.run_dir, {"epochs": 3}, lambda: False)
    with pytest.raises(UserError, match=r"--set log\.every_steps: log\.every_steps: should be greater"):
        attach("csv", run.run_dir, every_steps=0)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_package_that_is_missing_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MadeRun(tmp_path / "run")
    monkeypatch.delitem(sys.modules, f"fortyfold.sinks.{name}", raising=False)
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if "site-packages" not in place])
    with pytest.raises(UserError, match=rf"^{name} is not installed; pip install 'fortyfold\[{name}\]'$"):
        attach(name, run.run_dir)
    assert not run.run_dir.sink_lock(name).exists()


def test_a_csv_has_a_row_a_point_and_a_column_a_tag(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    run.steps(0, 10)
    attach("csv", run.run_dir)
    head, *rows = run.run_dir.points_csv.read_text().splitlines()
    assert head.startswith("examples_seen,step,time,losses/train,lr,speed/images_per_second,times/")
    assert rows[0].startswith("40,5,1004.000,18,0.5,8,") and len(rows) == 2
    assert all(row.count(",") == head.count(",") for row in rows)


def test_a_tensorboard_that_is_open_forgets_what_was_replaced(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = MadeRun(tmp_path / "run")
    run.steps(0, 10)
    attach("tensorboard", run.run_dir)
    live = EventAccumulator(str(run.run_dir.tensorboard))
    live.Reload()
    assert [scalar.value for scalar in live.Scalars("times/step_seconds")] == [1, 1]
    run.steps(5, 15, attempt=2)
    attach("tensorboard", run.run_dir)
    live.Reload()
    assert [scalar.value for scalar in live.Scalars("times/step_seconds")] == [1, 2, 2]
    assert [scalar.step for scalar in live.Scalars("losses/train")] == [40, 80, 120]
    assert [scalar.wall_time for scalar in live.Scalars("losses/train")] == [1004, 1009, 1014]
    attach("tensorboard", run.run_dir)
    assert sorted(path.stat().st_size > 0 for path in run.run_dir.tensorboard.iterdir()) == [False, True]


def test_files_of_others_in_the_tensorboard_folder_stay(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run").finish()
    run.run_dir.tensorboard.mkdir()
    (run.run_dir.tensorboard / "events.out.tfevents.1.theirs").touch()
    for _ in range(3):
        attach("tensorboard", run.run_dir)
    assert (run.run_dir.tensorboard / "events.out.tfevents.1.theirs").exists()
    assert len(read_tensorboard(run.run_dir)) == 6


NO_TENSORFLOW = """
import sys
sys.modules["tensorflow"] = sys.modules["torch"] = None
from fortyfold.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize("name", ["csv", "tensorboard"])
def test_neither_torch_nor_tensorflow_is_imported(name: str, tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run").finish()
    command = [sys.executable, "-c", NO_TENSORFLOW, "sink", str(run.run_dir.path), name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == f"written to {run.run_dir.path}/{'points.csv' if name == 'csv' else name}\n"


def test_wandb_offline_keeps_its_id_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "5ec" * 14
    monkeypatch.setenv("WANDB_API_KEY", secret)
    run = MadeRun(tmp_path / "a run").finish()
    command = [sys.executable, "-m", "fortyfold", "sink", str(run.run_dir.path), "wandb"]
    command += ["--set", "log.wandb_offline=true", "--set", "log.wandb_project=mine"]
    subprocess.run(command, check=True, capture_output=True)
    (started,) = [record.run for record in read_wandb_records(run.run_dir) if record.HasField("run")]
    assert (started.project, started.display_name) == ("mine", "a run")
    assert started.run_id == run.run_dir.wandb_id.read_text().strip()
    config = {item.key: item.value_json for item in started.config.update}
    assert '"test_resnet"' in config["model"]
    assert len(read_wandb(run.run_dir)) == 6
    metrics = [record.metric for record in read_wandb_records(run.run_dir) if record.HasField("metric")]
    assert ("*", "examples_seen") in [(metric.glob_name, metric.step_metric) for metric in metrics]
    files = [path for path in run.run_dir.path.rglob("*") if path.is_file()]
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    shown = subprocess.run(
        [Path(sys.executable).parent / "wandb", "sync", "--dry-run", run.run_dir.wandb],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "Would sync 1 run(s)" in shown.stdout + shown.stderr


def sink_to_wandb(folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """In a process that knows no key, no settings but the folder's wandb/settings, and these variables."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment |= {"HOME": str(folder), "NETRC": str(folder / "none"), **variables}
    command = [sys.executable, "-m", "fortyfold", "sink", str(folder / "run"), "wandb"]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({}, "wandb has no API key; run `wandb login`, set WANDB_API_KEY, or keep it "),
        ({"WANDB_MODE": "disabled"}, "wandb is disabled here; set WANDB_MODE to online or offline, or leave"),
        ({"WANDB_MODE": "ofline"}, "wandb's settings are wrong: mode: Input should be 'online', 'offline'"),
    ],
)
def test_wandb_that_cannot_be_used_is_one_line(tmp_path: Path, variables: dict[str, str], line: str) -> None:
    MadeRun(tmp_path / "run").finish()
    done = sink_to_wandb(tmp_path, **variables)
    assert done.returncode == 2
    assert done.stderr.startswith(f"fortyfold: {line}")
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.parametrize(
    ("settings", "variables", "names"),
    [
        ("", {"WANDB_MODE": "dryrun"}, ("fortyfold", "run")),
        ("[default]\nmode = offline\n", {"WANDB_PROJECT": "birds", "WANDB_NAME": "wren"}, ("birds", "wren")),
    ],
)
def test_wandbs_own_settings_count(
    tmp_path: Path, settings: str, variables: dict[str, str], names: tuple[str, str]
) -> None:
    run = MadeRun(tmp_path / "run").finish()
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text(settings)
    done = sink_to_wandb(tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    (started,) = [record.run for record in read_wandb_records(run.run_dir) if record.HasField("run")]
    assert (started.project, started.display_name) == names


class OnlineRun:
    """What the sink uses of a run at Weights & Biases."""

    url = "https://there"

    def __init__(self, summary: dict[str, Any]) -> None:
        self.summary, self.resumed, self.rows = summary, bool(summary), list[dict[str, Any]]()

    def define_metric(self, *arguments: Any, **options: Any) -> None:
        pass

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.summary |= row

    def finish(self) -> None:
        pass


def test_wandb_online_is_resumed_and_sent_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.delenv("WANDB_MODE", raising=False)
    summary: dict[str, Any] = {}
    opened: list[tuple[dict[str, Any], OnlineRun]] = []

    def init(**options: Any) -> OnlineRun:
        opened.append((options, OnlineRun(summary)))
        return opened[-1][1]

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "login", lambda **options: True)
    run = MadeRun(tmp_path / "run")
    run.steps(0, 8)
    assert attach("wandb", run.run_dir) == "https://there"
    run.evaluation(8)  # at as many examples as the last steps that were sent
    run.steps(8, 12)
    attach("wandb", run.run_dir)
    run.steps(6, 20, attempt=2)
    attach("wandb", run.run_dir)
    attach("wandb", run.run_dir)
    sent = [[(row["examples_seen"], "losses/val" in row) for row in online.rows] for _, online in opened]
    assert sent == [
        [(40, False), (64, False)],
        [(64, True), (80, False), (96, False)],
        [(120, False), (192, False)],
        [],
    ]
    assert {options["id"] for options, _ in opened} == {run.run_dir.wandb_id.read_text().strip()}
    assert {(options["mode"], options["resume"]) for options, _ in opened} == {("online", "allow")}


def test_what_wandb_says_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def login(**options: Any) -> bool:
        raise wandb.Error("no such host\nConsider something")

    monkeypatch.setattr(wandb, "login", login)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(RunFailed, match=r"^wandb: no such host$"):
        attach("wandb", MadeRun(tmp_path / "run").run_dir)
