"""Records, events and the lock: what a live, torn or crashed run leaves to its readers."""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fortyfold.spec import events, records
from fortyfold.spec.errors import UserError
from fortyfold.spec.records import HEADER, STEP_DTYPE, StepReader, last_attempts, read_steps
from fortyfold.spec.run_dir import RunDir, write_atomically


def make_records(steps: list[int], attempt: int) -> records.Records:
    block = np.zeros(len(steps), STEP_DTYPE)
    block["step"], block["attempt"] = steps, attempt
    return block


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_the_format_of_version_2_does_not_move() -> None:
    assert STEP_DTYPE.itemsize == 64
    assert HEADER.pack(records.MAGIC, 2, 64).hex() == "464653544550530002000000" + "40000000"
    assert STEP_DTYPE.names == (
        "step", "end_time", "attempt", "epoch", "phase", "images", "samples_digest",
        "data_wait_seconds", "step_seconds", "loss", "lr", "read_seconds", "decode_seconds", "resize_seconds",
    )  # fmt: skip


def test_records_of_version_1_are_still_read(tmp_path: Path) -> None:
    old = np.zeros(3, records.DTYPES[1])
    assert old.itemsize == 56
    old["step"], old["loss"] = [0, 1, 2], [3.0, 2.0, 1.0]
    path = tmp_path / "steps.bin"
    path.write_bytes(HEADER.pack(records.MAGIC, 1, 56) + old.tobytes() + b"torn")
    assert read_steps(path)["loss"].tolist() == [3.0, 2.0, 1.0]


def test_nothing_is_appended_to_records_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "steps.bin"
    path.write_bytes(HEADER.pack(records.MAGIC, 1, 56))  # begun, no record yet
    os.close(records.open_for_append(path))
    append(path, make_records([0, 1], attempt=2).tobytes())
    assert read_steps(path)["step"].tolist() == [0, 1]
    path.write_bytes(HEADER.pack(records.MAGIC, 1, 56) + bytes(2 * 56))
    with pytest.raises(UserError, match="has step records of version 1; start anew with --fresh"):
        records.open_for_append(path)


@given(st.integers(0, 5 * STEP_DTYPE.itemsize + HEADER.size))
def test_a_file_cut_anywhere_is_read_to_its_last_whole_record_and_mended(size: int) -> None:
    path = Path(os.environ["FORTYFOLD_CACHE"]) / "cut.bin"
    path.unlink(missing_ok=True)
    os.close(records.open_for_append(path))
    append(path, make_records([0, 1, 2, 3, 4], attempt=1).tobytes())
    os.truncate(path, size)
    whole = max(0, size - HEADER.size) // STEP_DTYPE.itemsize
    assert read_steps(path)["step"].tolist() == list(range(whole))
    descriptor = records.open_for_append(path)
    os.write(descriptor, make_records([whole], attempt=2).tobytes())
    os.close(descriptor)
    assert read_steps(path)["step"].tolist() == list(range(whole + 1))


def test_of_a_replayed_step_the_last_attempt_holds() -> None:
    block = np.concatenate([make_records([0, 1, 2, 3], 1), make_records([2, 3, 4], 2), make_records([4, 5], 3)])
    kept = last_attempts(block)
    assert kept["step"].tolist() == [0, 1, 2, 3, 4, 5]
    assert kept["attempt"].tolist() == [1, 1, 2, 2, 3, 3]


def test_a_reader_follows_a_file_that_is_not_there_yet_and_grows_by_halves(tmp_path: Path) -> None:
    path = tmp_path / "steps.bin"
    reader = StepReader(path)
    assert len(reader.poll()) == 0
    path.write_bytes(b"FF")
    assert len(reader.poll()) == 0
    os.close(records.open_for_append(path))
    data = make_records([0, 1, 2], 1).tobytes()
    append(path, data[:70])
    assert reader.poll()["step"].tolist() == [0]
    append(path, data[70:])
    assert reader.poll()["step"].tolist() == [1, 2]
    assert len(reader.poll()) == 0


def test_other_files_and_later_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.bin"
    path.write_bytes(b"something else, long enough")
    with pytest.raises(UserError, match="holds no step records"):
        read_steps(path)
    path.write_bytes(HEADER.pack(records.MAGIC, 99, 56))
    with pytest.raises(UserError, match="version 99"):
        read_steps(path)


@given(st.integers(0, 60))
def test_events_cut_anywhere_are_read_by_whole_lines_and_mended(size: int) -> None:
    path = Path(os.environ["FORTYFOLD_CACHE"]) / "cut.jsonl"
    lines = b"".join(b'{"kind":"x","n":%d}\n' % number for number in range(3))
    path.write_bytes(lines[:size])
    whole = lines[:size].count(b"\n")
    assert [event["n"] for event in events.read_events(path)] == list(range(whole))
    os.close(events.open_for_append(path))
    assert path.read_bytes() == lines[: lines[:size].rfind(b"\n") + 1]


def test_an_event_reader_follows(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = events.EventReader(path)
    assert reader.poll() == []
    path.write_bytes(b'{"kind":"a"}\n{"kind"')
    assert [event["kind"] for event in reader.poll()] == ["a"]
    append(path, b':"b"}\nnot json\n[1]\n{}\n')
    assert [event["kind"] for event in reader.poll()] == ["b"]


HOLD = """
import sys, time, pathlib
from fortyfold.spec.run_dir import RunDir
with RunDir(pathlib.Path(sys.argv[1])).hold():
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_holder_is_refused_and_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    assert not run_dir.is_locked()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, run_dir.path], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert run_dir.is_locked()
        with pytest.raises(UserError, match=f"is being trained by process {holder.pid} on"), run_dir.hold():
            pass
    finally:
        holder.kill()
        holder.communicate()
    assert not run_dir.is_locked()
    with run_dir.hold():
        assert run_dir.is_locked()


def test_a_command_holds_a_run_beside_the_process_that_trains(tmp_path: Path) -> None:
    """Between two attempts of its ranks, too."""
    run_dir = RunDir(tmp_path / "run")
    with run_dir.hold_launch():
        run_dir.refuse_foreign()
        with run_dir.hold():
            assert run_dir.is_locked()
        assert run_dir.is_locked()
        with pytest.raises(UserError, match="is being trained by process"), run_dir.hold_launch():
            pass
    assert not run_dir.is_locked()


def test_a_reader_that_looks_does_not_keep_a_trainer_out(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.lock.touch()
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        run_dir.is_locked()
        with run_dir.hold():
            pass


def test_a_folder_moved_away_while_waiting_for_its_lock_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path / "run")
    flock, calls = fcntl.flock, [0]

    def moving(descriptor: int, how: int) -> None:
        calls[0] += 1
        if calls[0] == 1:
            run_dir.path.rename(tmp_path / "aside")
        flock(descriptor, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", moving)
        holding = run_dir.hold()
        holding.__enter__()
    assert run_dir.is_locked()
    assert not RunDir(tmp_path / "aside").is_locked()
    holding.__exit__(None, None, None)


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": 1}', "null", "{"])
def test_a_damaged_run_json_is_a_users_error(tmp_path: Path, content: str) -> None:
    RunDir(tmp_path).spec.write_text(content)
    with pytest.raises(UserError, match=r"run\.json"):
        RunDir(tmp_path).read_spec()


def test_an_unwritable_place_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot lock the run directory"), RunDir(tmp_path / "file" / "run").hold():
        pass


def test_what_could_not_be_written_leaves_nothing_beside(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match=r"/folder'$"):
        write_atomically(tmp_path / "folder", b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
