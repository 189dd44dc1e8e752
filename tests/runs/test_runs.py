"""Whole runs through the command line: training, stopping, going on, failing. `tiny` for the mechanics."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kill_resume
import numpy as np
import pytest
import torch
from conftest import skip_or_fail, start
from images import encoded, malformed, pixels

import fortyfold.engine.evaluate as evaluation
from fortyfold.engine import checkpoint
from fortyfold.engine.journal import Journal
from fortyfold.engine.learner import Learner
from fortyfold.spec.events import Event, read_events
from fortyfold.spec.records import read_steps
from fortyfold.spec.run_dir import RunDir

Fortyfold = Callable[..., tuple[int, str, str]]


def events_of(run: Path, kind: str) -> list[Event]:
    return [event for event in read_events(RunDir(run).events()) if event["kind"] == kind]


@pytest.fixture(scope="module")
def calm(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """`tiny`, trained to the end undisturbed."""
    run_dir = RunDir(tmp_path_factory.mktemp("calm") / "run")
    process = start("train", "tiny", "--data", tiny_data, "--out", run_dir.path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (run_dir.path / "stdout.txt").write_text(out)
    return run_dir


def test_a_run_says_what_it_did_and_leaves_it_in_files(calm: RunDir) -> None:
    out = (calm.path / "stdout.txt").read_text()
    rows = calm.summary.read_text().splitlines()
    top1 = float(rows[-1].split(",")[4])
    assert f"top-1 {top1:.1f} % (50 images)" in out.splitlines()
    assert "epoch 3/3" in out
    assert rows[0] == "epoch,step,train_loss,val_loss,top1,top5,num_images,px,lr,hours"
    assert [row.split(",")[:2] for row in rows[1:]] == [["1", "8"], ["2", "16"], ["3", "24"]]
    assert calm.dawnbench.read_text().splitlines()[0] == "epoch\thours\ttop1Accuracy\ttop5Accuracy"
    spec = calm.read_spec()
    assert spec["recipe"]["model"]["name"] == "test_resnet"
    assert "pillow " in spec["decoder"]
    assert spec["versions"]["torch"] == torch.__version__
    assert spec["data"]["train"]["images"] == 250
    assert spec["command"][:3] == ["fortyfold", "train", "tiny"]
    records = read_steps(calm.steps())
    assert records["step"].tolist() == list(range(24))
    assert records["images"].reshape(3, 8).sum(axis=1).tolist() == [250, 250, 250]
    assert (records["step_seconds"] >= records["data_wait_seconds"]).all()
    kinds = [event["kind"] for event in read_events(calm.events())]
    assert kinds[0] == "started" and kinds[-1] == "finished"
    assert not list(calm.path.rglob("*.pkl")) and not list(calm.path.rglob("*.pt"))


def test_the_same_command_on_a_finished_run_changes_nothing(
    calm: RunDir, tiny_data: Path, fortyfold: Fortyfold
) -> None:
    before = {path: path.stat().st_mtime_ns for path in calm.checkpoints.rglob("*")}
    code, out, _ = fortyfold("train", "tiny", "--data", tiny_data, "--out", calm.path)
    assert code == 0
    assert "is trained already; --fresh starts anew" in out
    assert {path: path.stat().st_mtime_ns for path in calm.checkpoints.rglob("*")} == before


def test_training_again_gives_the_same_weights_whatever_the_threads(
    calm: RunDir, tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold
) -> None:
    arguments = ["--set", "data.threads=4", "--set", "data.prefetch=5", "--set", "checkpoint.every_steps=5"]
    assert fortyfold("train", "tiny", "--data", tiny_data, "--out", tmp_path / "run", *arguments)[0] == 0
    assert kill_resume.fingerprint(RunDir(tmp_path / "run")) == kill_resume.fingerprint(calm)


@pytest.mark.drill
def test_kills_change_nothing(tmp_path: Path, tiny_data: Path) -> None:
    """kill -9, at a random moment and inside a save, with all options; `benchmarks/kill_resume.py` does it oftener."""
    kill_resume.drill(tmp_path, tiny_data, kills=2, seed=1, options=kill_resume.EVERYTHING)


def stop_after(num_steps: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process a signal in the middle of the step after `num_steps`."""
    update, calls = Learner.update, [0]

    def counting(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == num_steps + 1:
            os.kill(os.getpid(), number)
        update(*arguments)

    monkeypatch.setattr(Learner, "update", counting)


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGINT, "cancelled"), (signal.SIGTERM, "terminated"), (signal.SIGUSR1, "out of time")],
)
def test_a_signal_saves_and_says_why_and_the_same_command_goes_on(
    calm: RunDir, tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals, reason: str,
) -> None:  # fmt: skip
    command = ("train", "tiny", "--data", tiny_data, "--out", tmp_path / "run")
    run_dir = RunDir(tmp_path / "run")
    with monkeypatch.context() as patch:
        stop_after(11, number, patch)
        code, out, err = fortyfold(*command)
    assert (code, err) == (75, "")
    assert f"stopped ({reason}) after step 12, saved; the same command goes on from there" in out
    marker = json.loads(run_dir.stopped.read_text())
    assert (marker["reason"], marker["signal"], marker["step"]) == (reason, number.name, 12)
    assert checkpoint.names(run_dir)[0] == "step-000000012-0001"
    assert f"stopped: {reason}" in fortyfold("runs", tmp_path)[1]
    code, out, _ = fortyfold(*command)
    assert code == 0
    assert "going on from step-000000012-0001 (step 12)" in out
    assert not run_dir.stopped.exists()
    assert kill_resume.fingerprint(run_dir) == kill_resume.fingerprint(calm)
    assert set(read_steps(run_dir.steps())["attempt"]) == {1, 2}


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_signal_during_evaluation_does_not_lose_the_evaluation(
    calm: RunDir, tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    command = ("train", "tiny", "--data", tiny_data, "--out", tmp_path / "run")
    evaluate, calls = evaluation.evaluate, [0]

    def stopping(*arguments: object) -> object:
        calls[0] += 1
        if calls[0] == epoch:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "evaluate", stopping)
        assert fortyfold(*command)[0] == 75
    assert len(events_of(tmp_path / "run", "evaluated")) == epoch - 1
    assert fortyfold(*command)[0] == 0
    assert fortyfold(*command)[1].count("is trained already") == 1
    run_dir = RunDir(tmp_path / "run")
    assert kill_resume.fingerprint(run_dir) == kill_resume.fingerprint(calm)
    drop_hours = [row.rpartition(",")[0] for row in run_dir.summary.read_text().splitlines()]
    assert drop_hours == [row.rpartition(",")[0] for row in calm.summary.read_text().splitlines()]


def test_damaged_checkpoints_are_named_and_passed_over(
    calm: RunDir, tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ("--set", "checkpoint.every_steps=2", "--set", "checkpoint.keep=9")
    command = ("train", "tiny", "--data", tiny_data, "--out", tmp_path / "run", *changes)
    run_dir = RunDir(tmp_path / "run")
    with monkeypatch.context() as patch:
        stop_after(11, signal.SIGTERM, patch)
        assert fortyfold(*command)[0] == 75
    newest, second, third = (run_dir.checkpoints / name for name in checkpoint.names(run_dir)[:3])
    content = bytearray((newest / "model.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "model.safetensors").write_bytes(content)
    os.truncate(second / "training.safetensors", 1000)
    code, out, _ = fortyfold(*command)
    assert code == 0
    assert f"passed over {newest.name}: model.safetensors was altered" in out
    assert f"passed over {second.name}: training.safetensors has 1000 bytes instead of" in out
    assert f"going on from {third.name}" in out
    assert kill_resume.fingerprint(run_dir) == kill_resume.fingerprint(calm)


def test_damaged_checkpoints_do_not_crowd_out_new_ones(
    calm: RunDir, tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the oldest are damaged; a run that goes on from there keeps what it saves."""
    run_dir = RunDir(tmp_path / "run")
    shutil.copytree(calm.path, run_dir.path)
    *damaged, whole = checkpoint.names(run_dir)
    for name in damaged:
        os.truncate(run_dir.checkpoints / name / "model.safetensors", 10)
    command = ("train", "tiny", "--data", tiny_data, "--out", run_dir.path)
    with monkeypatch.context() as patch:
        stop_after(1, signal.SIGTERM, patch)
        assert fortyfold(*command)[0] == 75
    saved = run_dir.checkpoint(int(whole.split("-")[1]) + 2, attempt=2).name
    assert checkpoint.names(run_dir) == [saved, whole]
    assert len(list(run_dir.checkpoints.glob("damaged-step-*"))) == len(damaged)
    assert fortyfold(*command)[0] == 0
    assert kill_resume.fingerprint(run_dir) == kill_resume.fingerprint(calm)


def test_a_run_killed_before_its_last_word_is_finished_all_the_same(
    calm: RunDir, tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold
) -> None:
    run_dir = RunDir(tmp_path / "run")
    shutil.copytree(calm.path, run_dir.path)
    lines = run_dir.events().read_bytes().splitlines(keepends=True)
    run_dir.events().write_bytes(b"".join(lines[:-1]))
    assert "killed" in fortyfold("runs", run_dir.path)[1]
    spec = run_dir.spec.read_bytes()
    for _ in range(2):
        assert fortyfold("train", "tiny", "--data", tiny_data, "--out", run_dir.path)[0] == 0
    assert "finished" in fortyfold("runs", run_dir.path)[1]
    assert len(events_of(run_dir.path, "finished")) == 1
    assert run_dir.spec.read_bytes() == spec


def test_waiting_for_data_is_not_waiting_for_the_device(
    tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = Journal.flush

    def slow(journal: Journal, *, durable: bool = False) -> None:
        time.sleep(0.3)
        flush(journal, durable=durable)

    monkeypatch.setattr(Journal, "flush", slow)
    monkeypatch.setattr("fortyfold.engine.journal.FLUSH_SECONDS", 0.0)
    assert fortyfold("train", "tiny", "--data", tiny_data, "--out", tmp_path / "run", "--epochs", 1)[0] == 0
    records = read_steps(RunDir(tmp_path / "run").steps())
    assert np.median(records["data_wait_seconds"][2:]) < 0.15


def test_another_recipe_or_other_data_is_refused_by_name(
    calm: RunDir, tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold
) -> None:
    def refused(*changes: object, data: Path = tiny_data) -> str:
        code, _, err = fortyfold("train", "tiny", "--data", data, "--out", calm.path, *changes)
        assert code == 2 and err.count("\n") == 1
        return err

    assert "was started with epochs = 3 (now 5), optim.lr = 0.05 (now 0.3);" in refused("--epochs", 5, "--lr", 0.3)
    assert "--fresh starts anew, --out DIR starts elsewhere" in refused("--lr", 0.3)
    assert "seed = 0 (now 1)" in refused("--set", "seed=1")
    other = tmp_path / "other"
    shutil.copytree(tiny_data, other)
    victim = next((other / "train").glob("*/*.jpg"))
    victim.rename(victim.with_name("renamed.jpg"))
    (other / "made.json").unlink()
    assert "train data of 250 images (now 250, or other files)" in refused(data=other)


def test_moved_data_and_free_keys_may_differ(
    calm: RunDir, tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(tiny_data, moved)
    changes = ["--set", "data.threads=1", "--set", "log.every_steps=3", "--set", "checkpoint.keep=7"]
    assert fortyfold("train", "tiny", "--data", moved, "--out", calm.path, *changes)[0] == 0


def test_fresh_moves_the_run_aside(calm: RunDir, tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    shutil.copytree(calm.path, tmp_path / "run")
    code, out, _ = fortyfold("train", "tiny", "--data", tiny_data, "--out", tmp_path / "run", "--fresh", "--epochs", 1)
    assert code == 0
    (aside,) = [path for path in tmp_path.iterdir() if path.name.startswith("run.")]
    assert f"the run that was here is now {aside}" in out
    assert len(read_steps(RunDir(aside).steps())) == 24
    assert len(read_steps(RunDir(tmp_path / "run").steps())) == 8


def test_a_second_trainer_is_refused(tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    run_dir = RunDir(tmp_path / "run")
    with run_dir.hold():
        code, _, err = fortyfold("train", "tiny", "--data", tiny_data, "--out", run_dir.path)
    assert code == 2
    assert f"is being trained by process {os.getpid()} on" in err
    assert err.count("\n") == 1


def test_a_folder_with_other_things_in_it_is_left_alone(tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    (tmp_path / "thesis.tex").touch()
    code, _, err = fortyfold("train", "tiny", "--data", tiny_data, "--out", tmp_path)
    assert code == 2
    assert "holds thesis.tex but no run; choose an empty folder for --out" in err


def test_a_model_that_does_not_fit_is_one_line(tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    command = ("train", "tiny", "--data", tiny_data, "--out", tmp_path / "run")
    code, _, err = fortyfold(*command, "--model", "vit_tiny_patch16_224")
    assert code == 2 and err.count("\n") == 1
    assert "the model cannot take images of 32 px: " in err
    vit = ("--set", "model.name=vit_tiny_patch16_224", "--set", "model.arguments.img_size=32")
    code, _, err = fortyfold(*command, *vit, "--set", "evaluate.px=64")
    assert code == 2 and "the model cannot take images of 64 px: " in err
    code, _, err = fortyfold(*command, "--set", "global_batch=1")
    assert code == 2 and err.count("\n") == 1
    assert "test_resnet cannot be trained with 1 images of 32 px a step: Expected more than 1 value" in err
    assert "Traceback" in events_of(tmp_path / "run", "failed")[-1]["traceback"]


def test_a_start_that_failed_does_not_bind_the_next(tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    command = ("train", "tiny", "--data", tiny_data, "--out", tmp_path / "run", "--epochs", 1)
    code, _, err = fortyfold(*command, "--model", "test_resnat")
    assert code == 2 and "did you mean test_resnet?" in err
    assert "failed" in fortyfold("runs", tmp_path)[1]
    assert fortyfold(*command)[0] == 0


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_samples(
    tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold
) -> None:
    code, _, err = fortyfold("train", "tiny", "--data", tiny_data, "--out", tmp_path / "run", "--lr", "1e30")
    assert code == 1 and err.count("\n") == 1
    (diverged,) = events_of(tmp_path / "run", "diverged")
    assert f"the loss of step {diverged['step']} is {diverged['loss']}" in err
    assert "try a lower optim.lr" in err
    from fortyfold.data import order

    epoch, batch = divmod(diverged["step"], 8)
    assert diverged["samples"] == order.batch_keys(order.permutation(250, 0, epoch), batch, 8, 32, "keep").tolist()
    assert "failed" in fortyfold("runs", tmp_path)[1]
    for name in checkpoint.names(RunDir(tmp_path / "run")):  # none of them holds what is not a number
        saved = checkpoint.read(RunDir(tmp_path / "run").checkpoints / name)
        assert all(tensor.isfinite().all() for tensor in saved.model.values())


@pytest.fixture
def damaged_data(tiny_data: Path, tmp_path: Path) -> Path:
    """`tiny` with 9 unreadable training images and 2 unreadable validation images."""
    root = tmp_path / "damaged"
    shutil.copytree(tiny_data, root)
    (root / "made.json").unlink()
    train = sorted((root / "train").glob("*/*.jpg"))[::25][:9]
    for path, blob in zip([*train, *sorted((root / "val").glob("*/*.jpg"))[:2]], [b"", b"junk"] * 6, strict=False):
        path.write_bytes(blob)
    grey = sorted((root / "train").glob("*/*.jpg"))[1]
    grey.write_bytes(encoded(pixels(48, 48).convert("CMYK")))
    return root


def test_bad_images_are_left_out_counted_and_named(damaged_data: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    command = (
        "train",
        "tiny",
        "--data",
        damaged_data,
        "--set",
        "data.bad_image_budget=0.04",
        "--out",
        tmp_path / "run",
    )
    code, out, _ = fortyfold(*command)
    assert code == 0
    quarantined = events_of(tmp_path / "run", "quarantined")
    assert len(quarantined) == 9
    assert {event["reason"] for event in quarantined} == {"the file is empty", "not an image that Pillow knows"}
    records = read_steps(RunDir(tmp_path / "run").steps())
    assert records["images"].reshape(3, 8).sum(axis=1).tolist() == [241] * 3
    assert "(48 images, 2 unreadable left out)" in out
    out = fortyfold("evaluate", tmp_path / "run")[1]
    assert out.count("unreadable: ") == 2
    assert "(48 images, 2 unreadable left out)" in out


def test_over_the_budget_the_run_stops_clearly(damaged_data: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    code, _, err = fortyfold("train", "tiny", "--data", damaged_data, "--out", tmp_path / "run")
    assert code == 2 and err.count("\n") == 1
    assert "4 of 250 training images cannot be read, more than data.bad_image_budget = 0.01 allows" in err


def test_two_hundred_malformed_images_train_and_resume(
    tmp_path: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split, count in (("train", 200), ("val", 12)):
        for number, blob in enumerate(malformed(count)):
            folder = tmp_path / "data" / split / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"bad-{number}.jpg").write_bytes(blob)
            (folder / f"good-{number}.jpg").write_bytes(encoded(pixels(40, 40, number)))
    command = ("train", "tiny", "--data", tmp_path / "data", "--set", "data.bad_image_budget=0.5", "--epochs", 2)
    assert fortyfold(*command, "--out", tmp_path / "calm")[0] == 0
    with monkeypatch.context() as patch:
        stop_after(5, signal.SIGTERM, patch)
        assert fortyfold(*command, "--out", tmp_path / "run")[0] == 75
    assert fortyfold(*command, "--out", tmp_path / "run")[0] == 0
    assert kill_resume.fingerprint(RunDir(tmp_path / "run")) == kill_resume.fingerprint(RunDir(tmp_path / "calm"))
    for run in ("calm", "run"):
        samples = [event["sample"] for event in events_of(tmp_path / run, "quarantined")]
        assert 150 < len(samples) == len(set(samples)) <= 200


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 5 MB: one checkpoint of `tiny` fits, and no second."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(place)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        skip_or_fail("mount", "a small file system cannot be mounted")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_a_clear_error_and_the_last_checkpoint_is_intact(
    small_disk: Path, tiny_data: Path, fortyfold: Fortyfold
) -> None:
    command = ("train", "tiny", "--data", tiny_data, "--out", small_disk / "run", "--set", "checkpoint.every_steps=3")
    code, _, err = fortyfold(*command)
    assert code == 1 and err.count("\n") == 1
    assert "cannot save step-" in err and "No space left on device" in err
    assert "step-000000003-0001 is intact and the same command goes on from it" in err
    assert fortyfold("evaluate", small_disk / "run")[0] == 0
    with pytest.raises(OSError, match="No space"), (small_disk / "rest").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    code, _, err = fortyfold("train", "tiny", "--data", tiny_data, "--out", small_disk / "another")
    assert code == 1 and err.count("\n") == 1 and "No space left on device" in err
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    code, out, _ = fortyfold(*command)
    assert code == 0
    assert "going on from step-000000003-0001" in out


def test_a_live_run_is_listed_as_running(tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    seen: list[str] = []

    def look() -> None:
        from fortyfold.metrics.overview import overview

        run_dir = RunDir(tmp_path / "run")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (run_dir.exists and len(read_steps(run_dir.steps()))):
            time.sleep(0.01)
        seen.append(overview(run_dir).state)

    watcher = threading.Thread(target=look)
    watcher.start()
    assert fortyfold("train", "tiny", "--data", tiny_data, "--out", tmp_path / "run", "--epochs", 6)[0] == 0
    watcher.join()
    assert seen == ["running"]


def test_phases_change_size_batch_and_rate(tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    recipe = tmp_path / "phased.toml"
    recipe.write_text(
        'global_batch = 32\n[model]\nname = "test_resnet"\n[data]\nroot = "x"\n[optim]\nlr = 0.1\n'
        "[[phases]]\nepochs = [0, 2]\npx = 32\nlr = [0.0, 0.2]\n"
        "[[phases]]\nepochs = [2, 3]\npx = 48\nrank_batch = 16\nlr = 0.05\nmin_scale = 0.5\n"
    )
    assert fortyfold("train", recipe, "--data", tiny_data, "--out", tmp_path / "run")[0] == 0
    records = read_steps(RunDir(tmp_path / "run").steps())
    assert records["phase"].tolist() == [0] * 16 + [1] * 16
    assert records["lr"][:16] == pytest.approx(0.2 * np.arange(16) / 16)
    assert records["lr"][16:] == pytest.approx(np.full(16, 0.05))
    assert [event["px"] for event in events_of(tmp_path / "run", "evaluated")] == [32, 32, 48]


def test_without_evaluation_no_validation_images_are_needed(
    tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold
) -> None:
    (tmp_path / "data").mkdir()
    shutil.copytree(tiny_data / "train", tmp_path / "data/train")
    command = ("train", "tiny", "--data", tmp_path / "data", "--out", tmp_path / "run")
    code, _, err = fortyfold(*command)
    assert code == 2 and "has no val/ or validation/" in err
    code, out, _ = fortyfold(*command, "--set", "evaluate.every_epochs=0")
    assert code == 0 and "top-1" not in out
    code, _, err = fortyfold("evaluate", tmp_path / "run")
    assert code == 2 and "trained without validation images; give --data DIR" in err


def test_the_best_checkpoint_is_kept_and_can_be_evaluated(calm: RunDir, fortyfold: Fortyfold) -> None:
    evaluated = events_of(calm.path, "evaluated")
    best = max(evaluated, key=lambda event: event["top1"])
    assert f"step-{best['step']:09d}-0001" in checkpoint.names(calm)
    code, out, _ = fortyfold("evaluate", calm.path, "--best")
    assert code == 0
    assert out.splitlines()[-1].startswith(f"top-1 {best['top1']:.1f} % (50 images)")
    newest = calm.checkpoints / checkpoint.names(calm)[0]
    assert fortyfold("evaluate", newest)[1].splitlines()[-1].startswith(f"top-1 {evaluated[-1]['top1']:.1f} % (50 ")


def test_evaluate_takes_other_data_by_class_name_and_other_sizes(
    calm: RunDir, tiny_data: Path, fortyfold: Fortyfold
) -> None:
    code, out, _ = fortyfold("evaluate", calm.path, "--data", tiny_data / "train", "--px", 48)
    assert code == 0
    assert "at 48 px" in out and "(250 images)" in out


def test_real_imagenet_jpegs_train_two_steps_of_resnet50(
    real_jpegs: Path, tmp_path: Path, fortyfold: Fortyfold
) -> None:
    for path in sorted(real_jpegs.glob("*.JPEG")):
        folder = tmp_path / "data" / "train" / path.name.partition("_")[0]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / path.name).symlink_to(path.resolve())
    changes = ["--epochs", 1, "--set", "px=32", "--set", "global_batch=100", "--set", "evaluate.every_epochs=0"]
    command = ("train", "resnet50", "--data", tmp_path / "data", "--out", tmp_path / "run")
    code, _, err = fortyfold(*command, *changes)
    assert (code, err) == (0, "")
    records = read_steps(RunDir(tmp_path / "run").steps())
    assert records["images"].tolist() == [100, 100]
    assert np.isfinite(records["loss"]).all()
