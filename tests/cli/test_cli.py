import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import skip_or_fail

import fortyfold as package
from fortyfold.cli.bars import bar
from fortyfold.spec.recipe_file import built_in_names
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag

Fortyfold = Callable[..., tuple[int, str, str]]

NO_TORCH = """
import json, sys
from fortyfold.cli.main import run
for command in json.loads(sys.argv[1]):
    code = run(command)
    heavy = {"torch", "timm", "torchvision", "safetensors"} & set(sys.modules)
    if code or heavy:
        sys.exit(f"{command}: exit code {code}, loaded {heavy}")
"""


def train_tiny(data: Path, out: Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "fortyfold", "train", "tiny", "--data", str(data), "--out", str(out)]
    return [*command, *options]


@pytest.fixture(scope="module")
def finished_run(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fortyfold.engine.train import train
    from fortyfold.spec.recipe_file import load_recipe

    folder = tmp_path_factory.mktemp("runs")
    train(load_recipe("tiny", {"data.root": str(tiny_data), "epochs": 1}), RunDir(folder / "one"), StopFlag())
    return folder / "one"


def test_help_recipes_runs_version_and_data_need_no_torch(finished_run: Path, tiny_data: Path) -> None:
    commands: list[list[object]] = [
        ["--help"], ["train", "--help"], ["recipes"], ["recipes", "show", "smoke", "--explain"],
        ["recipes", "show", "smoke", "--plot"],
        ["runs", finished_run.parent], ["sink", finished_run, "csv"], ["version"], ["data", "index", tiny_data],
    ]  # fmt: skip
    program = [sys.executable, "-c", NO_TORCH, json.dumps(commands, default=str)]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)


def test_python_m_is_the_same_program(fortyfold: Fortyfold) -> None:
    listing = subprocess.run([sys.executable, "-m", "fortyfold", "recipes"], capture_output=True, text=True, check=True)
    assert listing.stdout == fortyfold("recipes")[1]


def test_recipes_lists_each_with_its_first_line(fortyfold: Fortyfold) -> None:
    code, out, _ = fortyfold("recipes")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == built_in_names()
    assert all(len(line.split()) > 4 for line in out.splitlines())


def test_recipes_show_prints_the_resolved_toml(fortyfold: Fortyfold) -> None:
    code, out, _ = fortyfold("recipes", "show", "resnet50", "--set", "optim.lr=0.4", "--set", "model.name=vgg11")
    assert code == 0
    shown = tomllib.loads(out)
    assert shown["optim"]["lr"] == 0.4
    assert shown["model"]["name"] == "vgg11"
    assert shown["checkpoint"]["keep"] == 2
    explained = fortyfold("recipes", "show", "resnet50", "--explain")[1]
    assert "# Learning rate after the warm-up; a phase's own `lr` wins.\nlr = 0.1" in explained


def test_runs_lists_state_epoch_speed_and_top1(finished_run: Path, fortyfold: Fortyfold) -> None:
    for place in (finished_run, finished_run.parent):
        head, row = fortyfold("runs", place)[1].splitlines()
        assert head.split("  ")[0] == "run" and "img/s (mean)" in head
        assert row.split()[:3] == ["one", "finished", "1/1"]
        assert row.endswith("% (50 images)")


def test_version_names_the_decoder(fortyfold: Fortyfold) -> None:
    code, out, _ = fortyfold("version")
    assert code == 0
    assert out.startswith(f"fortyfold {package.__version__}\n")
    assert "decoder     " in out


def test_without_the_native_decoder_pillow_serves(tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    """As on a machine without a compiler; and a run does not go on with the other decoder."""
    environment = {**os.environ, "FORTYFOLD_DECODER": "pillow"}
    command = train_tiny(tiny_data, tmp_path / "r", "--epochs", "1")
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "decoder: pillow" in shown.stdout
    from fortyfold.data import decode

    if decode._native is None:
        skip_or_fail("native", "the native decoder was not built")
    code, _, err = fortyfold(*command[3:])
    assert code == 2
    assert "was started with the decoder pillow" in err


def test_a_missing_native_decoder_is_told_once(
    finished_run: Path, tiny_data: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fortyfold.data import decode

    command = ("train", "tiny", "--data", tiny_data, "--out", finished_run, "--epochs", "1")
    monkeypatch.setattr(decode, "_native", None)
    assert fortyfold(*command)[1].count("the native JPEG decoder was not built") == 1
    monkeypatch.setenv("FORTYFOLD_DECODER", "pillow")
    assert "not built" not in fortyfold(*command)[1]


def test_bench_loader(tiny_data: Path, fortyfold: Fortyfold) -> None:
    code, out, _ = fortyfold(
        "bench", "loader", tiny_data, tiny_data / "val", "--px", "16,32", "--threads", "1,2", "--seconds", "0.1",
        "--batch", "25",
    )  # fmt: skip
    assert code == 0
    head, *lines = out.splitlines()[1:]
    assert head.split() == ["data", "threads", "px", "img/s", "of", "limit", "read", "decode", "resize", "python"]
    assert len(lines) == 8
    for line in lines:
        reached = int(line.split("%")[0].split()[-1])
        assert 0 < reached <= 100 and line.endswith("µs/img")
    assert (
        fortyfold("bench", "loader", tiny_data, "--validation", "--px", "16", "--threads", "2", "--seconds", "0.1")[0]
        == 0
    )
    code, _, err = fortyfold("bench", "loader", tiny_data, "--px", "4")
    assert code == 2 and err == "fortyfold: --px 4: give numbers from 8 to 4096, as in --px 1,2\n"
    assert fortyfold("bench", "loader", tiny_data / "nowhere")[0] == 2


def test_data_demo_and_index(tmp_path: Path, fortyfold: Fortyfold) -> None:
    command = ("data", "demo", tmp_path / "d", "--classes", 3, "--images", 60, "--px", "40x30")
    assert "50 train, 10 val images, 3 classes, 40 × 30 pixels" in fortyfold(*command)[1]
    assert "(already there)" in fortyfold(*command)[1]
    out = fortyfold("data", "index", tmp_path / "d")[1]
    assert "train 50 images, 3 classes" in out and "val   10 images, 3 classes" in out


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("train", "Missing argument 'RECIPE' (see fortyfold train --help)"),
        ("train nosuch", "no recipe 'nosuch'"),
        ("train tiny --lrr 3", "No such option: --lrr"),
        ("train tiny --lr fast", "Invalid value for '--lr'"),
        ("train tiny --data nowhere", "no data folder nowhere; give --data DIR, or make one: fortyfold data demo"),
        ("train tiny --set data.root=nowhere", "no data folder nowhere"),
        ("train tiny --set optim.lrr=1", "--set optim.lrr: unknown key optim.lrr; did you mean optim.lr?"),
        ("train tiny --epochs 0", "--epochs: epochs: should be greater than or equal to 1, got 0"),
        ("train tiny --set data.std=[0,1,1]", "data.std.0: should be greater than 0"),
        (f"train {'x' * 300}", "File name too long"),
        ("data demo x --workers -1", "Invalid value for '--workers'"),
        ("trian tiny", "Did you mean 'train'?"),
        ("data demo x --px wide", "--px wide: give a side from 16 to 8192"),
        ("data demo x --px 9000", "--px 9000: give a side from 16 to 8192"),
        ("data demo x --images 5", "--images 5: 10 classes need at least 60"),
        ("data index nowhere", "no data folder nowhere"),
        ("evaluate nowhere", "nowhere is not a run: it has no run.json"),
        ("runs nowhere", "no folder nowhere"),
        ("sink nowhere csv", "nowhere is not a run: it has no run.json"),
        ("runs .", "no runs in ."),
        ("recipes show smok", "no recipe 'smok'; did you mean smoke?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fortyfold: Fortyfold, command: str, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = fortyfold(*command.split())
    assert code == 2
    assert line in err
    assert err.startswith("fortyfold: ") and err.count("\n") == 1 and err.endswith("\n")
    assert list(tmp_path.iterdir()) == []


def test_one_damaged_run_does_not_hide_the_others(finished_run: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    for name in ("good", "bad"):
        shutil.copytree(finished_run, tmp_path / name)
    (tmp_path / "bad" / "steps-00000.bin").write_bytes(b"something else entirely")
    code, out, _ = fortyfold("runs", tmp_path)
    assert code == 0
    assert "bad   unreadable: " in out and "good  finished" in out


def test_a_file_in_place_of_a_folder_is_one_line(tmp_path: Path, tiny_data: Path, fortyfold: Fortyfold) -> None:
    (tmp_path / "file").touch()
    train = ["train", "tiny", "--data", tiny_data, "--out", tmp_path / "file"]
    for command in (train, ["data", "demo", tmp_path / "file"]):
        code, _, err = fortyfold(*command)
        assert code == 2 and err.startswith("fortyfold: ") and err.count("\n") == 1


def test_stopping_while_data_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fortyfold: Fortyfold) -> None:
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(StopFlag, "requested", True)
        code, out, _ = fortyfold("train", "tiny")
    assert code == 75
    assert "stopped before training began; the same command goes on" in out
    assert fortyfold("train", "tiny", "--epochs", 1)[0] == 0


def test_naming_demo_keys_keeps_the_demo(fortyfold: Fortyfold) -> None:
    out = fortyfold("recipes", "show", "tiny", "--set", "data.root=mine", "--set", "data.demo.px=64")[1]
    assert tomllib.loads(out)["data"]["demo"]["px"] == 64


def test_a_bars_title_is_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with bar("in a{b}[red]") as report:
        report(1, 2)


def test_no_arguments_print_the_help(fortyfold: Fortyfold) -> None:
    code, out, _ = fortyfold()
    assert code == 0 and "Usage: fortyfold" in out


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m fortyfold recipes show smoke --explain | head -1"
    shell = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert "Traceback" not in shell.stderr


def test_a_terminal_that_goes_away_saves_the_run(tiny_data: Path, tmp_path: Path) -> None:
    import pty

    run_dir = RunDir(tmp_path / "r")
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may have been started with nohup
        command = train_tiny(tiny_data, run_dir.path, "--epochs", "2000")
        os.execv(command[0], command)  # noqa: S606
    steps, until = run_dir.steps(), time.monotonic() + 60
    while not (steps.exists() and steps.stat().st_size > 500) and time.monotonic() < until:
        os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
    assert json.loads(run_dir.stopped.read_text())["reason"] == "hung up" and run_dir.saved_steps()


def test_in_a_terminal_there_is_a_bar(tiny_data: Path, tmp_path: Path) -> None:
    """Under a pseudo-terminal, as a user sees it."""
    import pty

    captured = bytearray()

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 4096)
        captured.extend(data)
        return data

    command = train_tiny(tiny_data, tmp_path / "r", "--epochs", "4")
    with open(os.devnull, "w") as quiet, pytest.MonkeyPatch.context() as patch:  # noqa: PTH123
        patch.setattr(pty, "STDOUT_FILENO", quiet.fileno())
        patch.setenv("COLUMNS", "120")
        patch.setenv("TERM", "xterm")
        status = pty.spawn(command, read, lambda descriptor: b"")
    text = captured.decode(errors="replace")
    assert os.waitstatus_to_exitcode(status) == 0
    assert "img/s" in text and "left" in text and "━" in text
    assert "epoch 4/4  top-1" in text
