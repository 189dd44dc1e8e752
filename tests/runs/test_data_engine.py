"""Whole runs on what the data engine makes: shards, resized copies, rectangles; resumed and refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fortyfold.spec.events import read_events
from fortyfold.spec.records import read_steps
from fortyfold.spec.run_dir import RunDir

Fortyfold = Callable[..., tuple[int, str, str]]
QUICK = ("--set", "epochs=1")


def weights(run: Path) -> bytes:
    newest = sorted((run / "checkpoints").iterdir())[-1]
    return (newest / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def prepared(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny data as shards, and copies of it at 24 and 32 pixels."""
    from fortyfold.cli.main import run

    root = tmp_path_factory.mktemp("prepared")
    assert run(["data", "shard", str(tiny_data), str(root / "shards"), "--shards", "4", "--tile", "always"]) == 0
    assert run(["data", "resize", str(tiny_data), str(root / "copies"), "--short-side", "24,40"]) == 0
    return root


def test_folder_and_shards_train_the_same_weights_and_go_on_with_each_other(
    tiny_data: Path, prepared: Path, tmp_path: Path, fortyfold: Fortyfold
) -> None:
    assert fortyfold("train", "tiny", "--data", tiny_data, "--out", tmp_path / "folder", *QUICK)[0] == 0
    assert fortyfold("train", "tiny", "--data", prepared / "shards", "--out", tmp_path / "shards", *QUICK)[0] == 0
    assert weights(tmp_path / "folder") == weights(tmp_path / "shards")
    _, out, _ = fortyfold("train", "tiny", "--data", prepared / "shards", "--out", tmp_path / "folder", *QUICK)
    assert "is trained already" in out
    records = read_steps(RunDir(tmp_path / "shards").steps())
    for stage in ("read_seconds", "decode_seconds", "resize_seconds"):
        assert (records[stage] > 0).all()


def test_phases_read_the_copy_that_suffices_or_is_named(
    tiny_data: Path, prepared: Path, tmp_path: Path, fortyfold: Fortyfold
) -> None:
    recipe = tmp_path / "phased.toml"
    recipe.write_text(f"""
global_batch = 64
[model]
name = "test_resnet"
[data]
root = "{tiny_data}"
copies = "{prepared}/copies"
[optim]
lr = 0.05
[evaluate]
rectangular = true
[[phases]]
epochs = 1
px = 16
[[phases]]
epochs = 1
px = 32
rectangular = false
[[phases]]
epochs = 1
px = 32
data_copy = 24
[[phases]]
epochs = 1
px = 40
""")
    run = tmp_path / "run"
    code, out, err = fortyfold("train", recipe, "--out", run)
    assert code == 0, err
    assert json.loads((run / "run.json").read_text())["data"]["copies"] == ["24", "40", "24", "original"]
    scores = [event for event in read_events(RunDir(run).events()) if event["kind"] == "evaluated"]
    assert ["rect_top1" not in event for event in scores] == [False, True, False, False]
    assert out.count("rectangular top-1") == 3
    header, *rows = (run / "summary.csv").read_text().splitlines()
    column = header.split(",").index("rect_top1")
    assert [bool(row.split(",")[column]) for row in rows] == [True, False, True, True]
    _, out, _ = fortyfold("evaluate", run)
    assert "rectangular: top-1" in out and out.count("(50 images)") == 2

    code, _, err = fortyfold("train", recipe, "--out", run, "--set", "phases.1.data_copy=original")
    assert code == 2 and "was started with" in err
    code, _, err = fortyfold("train", recipe, "--out", tmp_path / "x", "--set", "phases.1.data_copy=99")
    assert code == 2 and "data_copy = 99: there is no such copy" in err


def test_block_shuffle_trains_and_its_layout_is_part_of_the_run(
    tiny_data: Path, prepared: Path, tmp_path: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = ("--set", "data.shuffle=block", "--set", "data.read_ahead=2", *QUICK)
    assert fortyfold("train", "tiny", "--data", prepared / "shards", "--out", tmp_path / "run", *block)[0] == 0
    fortyfold("data", "shard", tiny_data, tmp_path / "other", "--shards", "3", "--tile", "never")
    code, _, err = fortyfold("train", "tiny", "--data", tmp_path / "other", "--out", tmp_path / "run", *block)
    assert code == 0, err  # the shards differ, but not the order in which the samples lie
    monkeypatch.setattr("fortyfold.data.prepare.shard._STORAGE_SEED", 7)
    fortyfold("data", "shard", tiny_data, tmp_path / "mixed", "--shards", "4", "--tile", "never")
    code, _, err = fortyfold("train", "tiny", "--data", tmp_path / "mixed", "--out", tmp_path / "run", *block)
    assert code == 2 and "shards laid out as" in err
    code, _, err = fortyfold("train", "tiny", "--data", tiny_data, "--out", tmp_path / "new", *block)
    assert code == 2 and "needs shards" in err and len(err.splitlines()) == 1


def test_other_interpolation_or_orientation_is_another_run(
    tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold
) -> None:
    command = ("train", "tiny", "--data", tiny_data, "--out", tmp_path / "run", *QUICK)
    assert fortyfold(*command, "--set", "data.interpolation=bicubic", "--set", "data.exif_orientation=true")[0] == 0
    code, _, err = fortyfold(*command)
    assert code == 2 and "data.interpolation = bicubic (now bilinear)" in err
    code, _, err = fortyfold(*command, "--set", "data.interpolation=nearest")
    assert code == 2 and "data.interpolation: should be 'bilinear' or 'bicubic'" in err


def test_dali_that_is_not_installed_is_one_line(
    tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nvidia.dali", None)
    code, _, err = fortyfold("train", "tiny", "--data", tiny_data, "--out", tmp_path, "--set", "data.backend=dali")
    assert code == 2
    assert err == 'fortyfold: data.backend = "dali" needs NVIDIA DALI; pip install fortyfold[dali]\n'
