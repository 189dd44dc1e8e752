"""Staging sharded data: whole or not at all, one copier a node, and training that cannot tell the difference."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import skip_or_fail, start
from kills import contents, finish_despite_kills

from fortyfold.data import copying
from fortyfold.data import stage as staging
from fortyfold.data.index import Index
from fortyfold.data.stage import scratch_folder, stage
from fortyfold.spec.errors import UserError

Fortyfold = Callable[..., tuple[int, str, str]]

# Stages as soon as the third argument exists, slowly; says what it copied.
SLOW = """
import sys, time
from pathlib import Path
from fortyfold.data import copying, stage
copy = copying._copy
def slowly(*arguments):
    time.sleep(0.05)
    copy(*arguments)
copying._copy = slowly
source, scratch, gate = map(Path, sys.argv[1:])
print("ready", flush=True)
while not gate.exists():
    time.sleep(0.01)
staged = stage.stage(source, scratch, 2, lambda done, total: None, say=lambda line: print(line, flush=True))
print("copied", staged.copied_bytes, flush=True)
"""


def nothing(done: int, total: int) -> None:
    pass


@pytest.fixture
def shards(tiny_shards: Path) -> Path:
    return tiny_shards


@pytest.fixture
def own_shards(shards: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(shards, tmp_path / "source" / "tiny"))


def tar_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.tar"))


def start_slowly(shards: Path, scratch: Path, gate: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SLOW, str(shards), str(scratch), str(gate)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def wait_for_shards(num_shards: int, scratch: Path, copier: "subprocess.Popen[str]") -> None:
    while len(list(scratch.rglob("[!.]*.tar"))) < num_shards:
        assert copier.poll() is None
        time.sleep(0.01)


def test_a_copy_is_the_same_bytes_and_is_found_again(shards: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    code, out, err = fortyfold("data", "stage", shards, tmp_path / "scratch", "--streams", 2)
    assert (code, err) == (0, "")
    (place,) = (tmp_path / "scratch").iterdir()
    assert place.name.startswith("tiny-") and len(place.name) == len("tiny-") + 12
    assert contents(place) == contents(shards)
    assert f" in 30 shards to {place} (" in out and out.endswith(" MB/s), 0 bytes were there\n")
    times = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    code, out, _ = fortyfold("data", "stage", shards, tmp_path / "scratch")
    assert out.startswith(f"staged 0 bytes in 0 shards to {place}, ") and " 0 bytes were there" not in out
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == times


def test_progress_counts_every_byte_once(shards: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    staged = stage(shards, tmp_path, 2, lambda done, total: seen.append((done, total)))
    assert (staged.copied_bytes, staged.there_bytes, staged.num_copied) == (tar_bytes(shards), 0, 30)
    assert staged.root.parent == tmp_path.resolve() and staged.seconds > 0
    assert seen[-1] == (tar_bytes(shards), tar_bytes(shards))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_other_data_of_the_same_name_goes_elsewhere(shards: Path, own_shards: Path, tmp_path: Path) -> None:
    shutil.rmtree(own_shards / "val")
    one, other = (stage(source, tmp_path / "scratch", 2, nothing).root for source in (shards, own_shards))
    assert one != other and one.parent == other.parent
    assert contents(one) == contents(shards) and contents(other) == contents(own_shards)
    single = stage(shards / "val", tmp_path / "scratch", 2, nothing).root
    assert contents(single) == contents(shards / "val")


def test_what_is_lacking_is_copied_and_foreign_files_stay(shards: Path, tmp_path: Path) -> None:
    place = stage(shards, tmp_path, 2, nothing).root
    (place / "notes.txt").write_text("mine")
    (place / "train/train-000099.tar").write_text("mine")
    os.truncate(place / "train/train-000003.tar", 512)
    (place / "val/val-000001.tar").unlink()
    (place / "val/.val-000002.tar.part").write_text("left by a kill")
    staged = stage(shards, tmp_path, 2, nothing)
    lacking = sum((shards / name).stat().st_size for name in ("train/train-000003.tar", "val/val-000001.tar"))
    assert (staged.num_copied, staged.copied_bytes) == (2, lacking)
    assert staged.there_bytes == tar_bytes(shards) - lacking
    found = contents(place)
    assert found.keys() - contents(shards).keys() == {"notes.txt", "train/train-000099.tar"}
    assert found.items() >= contents(shards).items()


def test_a_split_lacks_its_index_until_it_is_whole(shards: Path, tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    place = stage(shards, tmp_path, 2, nothing).root
    (place / "train/train-000003.tar").unlink()

    def stop(done: int, total: int) -> None:
        assert not (place / "train/shards.index").exists() and (place / "val/shards.index").exists()
        raise Enough

    with pytest.raises(Enough):
        stage(shards, tmp_path, 2, stop)
    assert not (place / "train/shards.index").exists() and not list(place.rglob(".*.part"))
    stage(shards, tmp_path, 2, nothing)
    assert contents(place) == contents(shards)


def test_a_damaged_source_is_named_and_nothing_of_it_is_kept(
    own_shards: Path, tmp_path: Path, fortyfold: Fortyfold
) -> None:
    shard = own_shards / "train/train-000005.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:700] + bytes([whole[700] ^ 1]) + whole[701:])
    code, _, err = fortyfold("data", "stage", own_shards, tmp_path / "scratch", "--streams", 2)
    assert code == 2 and err.count("\n") == 1
    assert f"{shard} does not match its checksum" in err
    (place,) = (tmp_path / "scratch").iterdir()
    assert not list(place.rglob("*train-000005*")) and not list(place.rglob("shards.index"))
    kept = len(list(place.rglob("*.tar")))
    assert kept > 0
    shard.unlink()
    assert f"{shard} is missing or has another size" in fortyfold("data", "stage", own_shards, tmp_path / "scratch")[2]
    shard.write_bytes(whole)
    assert stage(own_shards, tmp_path / "scratch", 2, nothing).num_copied <= 30 - kept
    assert contents(place) == contents(own_shards)


def test_verify_finds_damage_behind_the_right_size(shards: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    place = stage(shards, tmp_path, 2, nothing).root
    for name in ("val/val-000002.tar", "train/shards.index"):
        damaged = bytearray((place / name).read_bytes())
        damaged[-1] ^= 1
        (place / name).write_bytes(damaged)
    assert stage(shards, tmp_path, 2, nothing).num_copied == 0
    assert contents(place) != contents(shards)
    code, out, _ = fortyfold("data", "stage", shards, tmp_path, "--verify", "--streams", 2)
    assert code == 0 and " in 1 shards to " in out
    assert contents(place) == contents(shards)
    assert stage(shards, tmp_path, 2, nothing, verify=True).num_copied == 0


def test_plain_folders_are_refused_with_what_to_do(tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    code, _, err = fortyfold("data", "stage", tiny_data, tmp_path)
    assert code == 2 and err.count("\n") == 1
    assert f"{tiny_data / 'train'} is not sharded" in err and "fortyfold data shard" in err
    assert not list(tmp_path.iterdir())
    assert "fortyfold: no data folder" in fortyfold("data", "stage", tmp_path / "nowhere", tmp_path)[2]


def test_of_three_at_once_one_copies(shards: Path, tmp_path: Path) -> None:
    processes = [start_slowly(shards, tmp_path / "scratch", tmp_path / "gate") for _ in range(3)]
    (tmp_path / "gate").touch()
    outputs = {process.pid: process.communicate(timeout=60)[0] for process in processes}
    copied = {pid: int(out.split()[-1]) for pid, out in outputs.items()}
    assert sorted(copied.values()) == [0, 0, tar_bytes(shards)]
    copier = max(copied, key=lambda pid: copied[pid])
    for pid, out in outputs.items():
        assert (f"waiting for process {copier} on " in out) == (pid != copier)
    (place,) = (tmp_path / "scratch").iterdir()
    assert contents(place) == contents(shards)


def test_a_killed_copier_is_taken_over(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "gate").touch()
    first = start_slowly(shards, tmp_path / "scratch", tmp_path / "gate")
    wait_for_shards(1, tmp_path / "scratch", first)
    os.kill(first.pid, signal.SIGSTOP)  # however slowly the second starts, there is something left to do
    second = start("data", "stage", shards, tmp_path / "scratch", "--streams", 1)
    assert second.stdout is not None
    assert f"waiting for process {first.pid} on " in second.stdout.readline()
    first.kill()
    first.communicate()
    out, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    assert out.startswith("staged ") and not out.startswith("staged 0 bytes") and ", 0 bytes were there" not in out
    (place,) = (tmp_path / "scratch").iterdir()
    assert contents(place) == contents(shards)


def test_ctrl_c_ends_the_wait_and_the_copying(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "gate").touch()
    copier = start_slowly(shards, tmp_path / "scratch", tmp_path / "gate")
    wait_for_shards(1, tmp_path / "scratch", copier)
    os.kill(copier.pid, signal.SIGSTOP)
    waiter = start("data", "stage", shards, tmp_path / "scratch")
    assert waiter.stdout is not None and "waiting for" in waiter.stdout.readline()
    waiter.send_signal(signal.SIGINT)
    assert waiter.communicate(timeout=30)[1] == "fortyfold: interrupted\n"
    os.kill(copier.pid, signal.SIGINT)
    os.kill(copier.pid, signal.SIGCONT)
    assert "copied" not in copier.communicate(timeout=30)[0]
    assert not list((tmp_path / "scratch").rglob(".*.part"))


def test_kills_change_nothing(shards: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    (tmp_path / "gate").touch()
    for num_shards in (5, 12, 19):
        wait_for_shards(num_shards, scratch, process := start_slowly(shards, scratch, tmp_path / "gate"))
        process.kill()
        process.communicate()
    assert 19 <= len(list(scratch.rglob("*.tar"))) < 30
    finish_despite_kills(2, "data", "stage", shards, scratch, "--streams", 1, most_seconds=1.5)
    (place,) = scratch.iterdir()
    assert contents(place) == contents(shards)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=500k", "tmpfs", str(place)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        skip_or_fail("mount", "a small file system cannot be mounted")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_seen_before_and_survived_in_the_middle(
    shards: Path, small_disk: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = fortyfold("data", "stage", shards, small_disk)
    assert code == 2 and "needs about" in err and not list(small_disk.rglob("*.tar"))
    monkeypatch.setattr(staging, "require_space", lambda folder, needed_bytes: None)
    code, _, err = fortyfold("data", "stage", shards, small_disk, "--streams", 2)
    assert code == 1 and err.count("\n") == 1
    assert "No space left on device" in err and "the same command goes on" in err
    (place,) = small_disk.iterdir()
    kept = contents(place)
    assert kept and kept.items() <= contents(shards).items()
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    assert stage(shards, small_disk, 2, nothing).num_copied == 30 - len(kept)
    assert contents(place) == contents(shards)


def test_an_unset_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_DISK", "/disk")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("GONE", raising=False)
    assert scratch_folder("$NODE_DISK/a") == scratch_folder("${NODE_DISK}/a") == Path("/disk/a")
    for name, text in (("GONE", "$GONE/a"), ("GONE", "${GONE}"), ("EMPTY", "$EMPTY")):
        with pytest.raises(UserError, match=f"the environment variable {name} is not set"):
            scratch_folder(text)


def test_training_from_a_staged_copy_gives_the_same_weights(
    shards: Path, tiny_data: Path, tmp_path: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "scratch"))
    options = ("--epochs", 1, "--set", "data.threads=1")
    staged = (
        "train",
        "tiny",
        "--data",
        shards,
        "--out",
        tmp_path / "staged",
        *options,
        "--set",
        "data.stage=$NODE_DISK",
    )
    assert fortyfold("train", "tiny", "--data", tiny_data, "--out", tmp_path / "plain", *options)[0] == 0
    opened: list[Path] = []

    def noting(source: Path, place: Path, split: str) -> Index:
        opened.append(place)
        return staging.open_staged(source, place, split)

    monkeypatch.setattr("fortyfold.engine.setup.open_staged", noting)
    code, out, err = fortyfold(*staged)
    assert (code, err) == (0, "")
    (place,) = (tmp_path / "scratch").iterdir()
    assert f" in 30 shards to {place} (" in out
    assert opened == [place, place]
    plain, copied = (sorted((tmp_path / run).rglob("model.safetensors")) for run in ("plain", "staged"))
    assert [path.read_bytes() for path in plain] == [path.read_bytes() for path in copied] != []
    spec = json.loads((tmp_path / "staged/run.json").read_text())
    assert (spec["recipe"]["data"]["root"], spec["recipe"]["data"]["stage"]) == (str(shards), "$NODE_DISK")
    assert spec["data"]["val"]["folder"] == str(shards / "val")
    assert str(tmp_path / "scratch") not in json.dumps(spec)
    shutil.rmtree(tmp_path / "scratch")
    assert "(50 images)" in fortyfold("evaluate", tmp_path / "staged")[1]
    monkeypatch.delenv("NODE_DISK")
    code, _, err = fortyfold(*staged)
    assert code == 2 and "the environment variable NODE_DISK is not set" in err


def test_a_stop_request_ends_the_staging_before_training(
    shards: Path, tmp_path: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, calls = copying._copy, [0]

    def stopping(*arguments: object) -> None:
        calls[0] += 1
        if calls[0] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        copy(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(copying, "_copy", stopping)
    command = ("train", "tiny", "--data", shards, "--out", tmp_path / "run", "--set", f"data.stage={tmp_path}/scratch")
    code, out, _ = fortyfold(*command)
    assert code == 75 and "stopped before training began; the same command goes on" in out
    (place,) = (tmp_path / "scratch").iterdir()
    assert not list(place.rglob("shards.index")) and not list(place.rglob(".*.part"))
    assert not (tmp_path / "run").exists()
