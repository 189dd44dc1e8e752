"""A worker's last word, as torchrun reads it."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fortyfold.parallel.failure import report
from fortyfold.parallel.torchrun import _tell
from fortyfold.spec.errors import RunFailed, UserError

ENDING = """
import threading
from fortyfold.parallel.failure import end_process
from fortyfold.spec.failure import Failure
threading.Thread(target=lambda: end_process(Failure(3, "lost", "rank 1 was lost", (1,)))).start()
threading.Event().wait()
"""


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "3")
    return tmp_path / "error.json"


def test_torchrun_reads_it(error_file: Path) -> None:
    try:
        raise ValueError("no\nluck")
    except ValueError as error:
        said = report(error)
    read = ProcessFailure(local_rank=1, pid=77, exitcode=1, error_file=str(error_file))
    assert read.timestamp == int(said.time)
    failure = _tell(3, read, set())
    assert (failure.rank, failure.kind, failure.message) == (3, "exception", "ValueError: no luck")
    assert failure.process == 77 and failure.time == said.time and "test_failure.py" in failure.traceback


def test_the_first_word_holds(error_file: Path) -> None:
    report(UserError("no model 'x'"))
    before = error_file.read_bytes()
    report(RuntimeError("connection closed"), "consequence", (0,))
    assert error_file.read_bytes() == before
    assert _tell(3, ProcessFailure(0, 1, 2, str(error_file)), set()).kind == "UserError"


def test_kinds() -> None:
    assert report(RunFailed("the disk is full")).message == "the disk is full"
    assert report(RunFailed("the disk is full")).kind == "RunFailed"
    assert report(KeyboardInterrupt()).message == "KeyboardInterrupt"
    assert len(report(ValueError("x" * 10_000)).message) < 1000


def test_no_place_to_write(error_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file.parent / "missing" / "error.json"))
    assert report(ValueError("no luck")).kind == "exception"


def test_a_worker_of_torchelastics_own_kind(error_file: Path) -> None:
    error_file.write_text('{"message": {"message": "boom", "extraInfo": {"py_callstack": "T", "timestamp": "5"}}}')
    failure = _tell(0, ProcessFailure(0, 1, 1, str(error_file)), {1})
    assert (failure.kind, failure.message, failure.traceback, failure.time) == ("exception", "boom", "T", 5.0)


def test_the_wordless(error_file: Path) -> None:
    assert _tell(2, ProcessFailure(0, 1, -9, str(error_file)), set()).message == "was killed by SIGKILL"
    assert _tell(2, ProcessFailure(0, 1, -9, str(error_file)), {1}).kind == "ended"
    assert _tell(2, ProcessFailure(0, 1, 4, str(error_file)), set()).kind == "gone"


def test_ending_this_process(error_file: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "rank 3: rank 1 was lost\n")
    assert _tell(3, ProcessFailure(0, 1, 1, str(error_file)), set()).ranks == (1,)
