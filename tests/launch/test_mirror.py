"""A copy of a run directory that follows it, change by change."""

import shutil
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path, PurePosixPath

import pytest

from fortyfold.launch import mirror, mirroring, remote
from fortyfold.launch.bootstrap import make_wheel, pinned_versions
from fortyfold.launch.container import render_definition, write_definition
from fortyfold.launch.mirror import Sender, read_changes, send, write_change
from fortyfold.launch.mirroring import mirrored
from fortyfold.launch.plan import Plan
from fortyfold.spec.errors import RunFailed
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.site_file import parse_site


@pytest.fixture
def source(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "source")
    (run_dir.path / "logs").mkdir(parents=True)
    run_dir.spec.write_text("{}")
    run_dir.events().write_text("one\n")
    run_dir.rank_log(1).write_text("said\n")
    return run_dir


def save(run_dir: RunDir, step: int) -> None:
    folder = run_dir.checkpoint(step, 1)
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "manifest.json"):
        (folder / name).write_bytes(bytes([step]) * 3_000_000)


def files(run_dir: RunDir) -> dict[str, bytes]:
    found = [path for path in run_dir.path.rglob("*") if path.is_file()]
    return {path.relative_to(run_dir.path).as_posix(): path.read_bytes() for path in found}


def carry(sender: Sender, source: RunDir, copy: RunDir) -> int:
    """One round; gives how many bytes it took."""
    buffer = BytesIO()
    for change in sender.changes():
        write_change(source, change, buffer)
    buffer.seek(0)
    list(read_changes(copy, buffer))
    return buffer.tell()


def test_it_follows_by_small_pieces(source: RunDir, tmp_path: Path) -> None:
    copy, sender = RunDir(tmp_path / "copy"), Sender(source)
    carry(sender, source, copy)
    assert files(copy) == files(source)
    assert carry(sender, source, copy) == 0
    with source.events().open("a") as events:
        events.write("two\n" * 100_000)
    assert 400_000 < carry(sender, source, copy) < 400_300
    save(source, 7)
    source.summary.write_text("a,b\n")
    carry(sender, source, copy)
    assert files(copy) == files(source)
    source.spec.write_text('{"a": 1}')
    source.rank_log(1).write_text("")  # cut
    carry(sender, source, copy)
    assert copy.spec.read_text() == '{"a": 1}' and copy.rank_log(1).read_text() == "said\n"  # the longer one holds


def test_a_checkpoint_is_whole_or_absent_and_pruned_ones_go(source: RunDir, tmp_path: Path) -> None:
    copy, buffer = RunDir(tmp_path / "copy"), BytesIO()
    save(source, 3)
    send(source, buffer, once=True)
    cut = BytesIO(buffer.getvalue()[:-2_000_000])
    with pytest.raises(RunFailed, match="ended in the middle of a file"):
        list(read_changes(copy, cut))
    assert copy.checkpoint_names() == []
    list(read_changes(copy, BytesIO(buffer.getvalue())))
    assert copy.checkpoint_names() == ["step-000000003-0001"]
    save(source, 5)
    shutil.rmtree(source.checkpoint(3, 1))
    again = BytesIO()
    send(source, again, once=True)
    list(read_changes(copy, BytesIO(again.getvalue())))
    assert copy.checkpoint_names() == ["step-000000005-0001"]


def test_an_older_copy_removes_nothing_newer(source: RunDir, tmp_path: Path) -> None:
    copy, buffer = RunDir(tmp_path / "copy"), BytesIO()
    for run_dir, steps in ((source, (3,)), (copy, (2, 5))):
        for step in steps:
            save(run_dir, step)
    send(source, buffer, once=True)
    list(read_changes(copy, BytesIO(buffer.getvalue())))
    assert copy.checkpoint_names() == ["step-000000005-0001", "step-000000003-0001"]


def test_all_but_checkpoints(source: RunDir, tmp_path: Path) -> None:
    """The newest that the copy has of old stays."""
    copy, buffer = RunDir(tmp_path / "copy"), BytesIO()
    save(source, 5)
    save(copy, 2)
    save(copy, 3)
    send(source, buffer, "no-checkpoints", once=True)
    list(read_changes(copy, BytesIO(buffer.getvalue())))
    assert copy.checkpoint_names() == ["step-000000003-0001"]
    assert {path.name for path in copy.path.iterdir()} == {"run.json", "events-00000.jsonl", "logs", "checkpoints"}


def test_the_newest_goes_first_and_its_manifest_last(source: RunDir) -> None:
    save(source, 3)
    save(source, 5)
    sent = [change.path for change in Sender(source).changes() if change.checkpoint]
    assert [PurePosixPath(path).parts[1:] for path in sent] == [
        (f"step-00000000{step}-0001", name) for step in (5, 3) for name in ("model.safetensors", "manifest.json")
    ]


def test_hosts_that_share_a_disk_may_send_the_same_twice(source: RunDir, tmp_path: Path) -> None:
    copy, senders = RunDir(tmp_path / "copy"), [Sender(source), Sender(source, "records")]
    for sender in senders:
        carry(sender, source, copy)
    for _ in range(3):
        for sender in senders:
            with source.events().open("a") as events:
                events.write("more\n")
            carry(sender, source, copy)
    list(senders[0].changes())
    carry(senders[1], source, copy)
    assert copy.events().read_text() == source.events().read_text()


def test_other_ranks_send_their_records_only(source: RunDir, tmp_path: Path) -> None:
    copy = RunDir(tmp_path / "copy")
    save(source, 3)
    carry(Sender(source, "records"), source, copy)
    assert set(files(copy)) == {"events-00000.jsonl", "logs/rank-00001.log"}


@pytest.mark.parametrize("path", ["../escape", "/etc/escape", "logs/../../escape"])
def test_nothing_is_written_outside(path: str, tmp_path: Path) -> None:
    line = f'{{"path": "{path}", "offset": 0, "size": 1, "checkpoint": "", "last": false}}\nx'
    with pytest.raises(RunFailed, match="sends a file to"):
        list(read_changes(RunDir(tmp_path / "copy"), BytesIO(line.encode())))


def test_the_wheel_is_that_of_this_installation_and_always_the_same() -> None:
    name, wheel = make_wheel()
    make_wheel.cache_clear()
    assert make_wheel() == (name, wheel)
    assert name.startswith("fortyfold-") and name.endswith(".whl")
    assert "torch==2.13.0\n" in pinned_versions() and "+" not in pinned_versions()


def test_a_containers_definition_has_all_it_names(tmp_path: Path) -> None:
    path = write_definition(tmp_path / "container")
    assert path.read_text() == render_definition()
    named = [line.split()[0] for line in path.read_text().partition("%files\n")[2].splitlines()[:2]]
    assert sorted([*named, path.name]) == sorted(entry.name for entry in path.parent.iterdir())


def test_a_shell_may_say_something_first(source: RunDir, tmp_path: Path) -> None:
    buffer = BytesIO()
    send(source, buffer, once=True)
    list(read_changes(RunDir(tmp_path / "copy"), BytesIO(b"Welcome to gpu1!\n" + buffer.getvalue())))
    assert files(RunDir(tmp_path / "copy")) == files(source)


def test_a_broken_copy_is_taken_up_again(source: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection lasts for what there is; the next brings what has come since."""
    starts: list[str] = []

    def start(site: object, host: str, script: str, **options: object) -> "subprocess.Popen[bytes]":
        starts.append(host)
        command = [sys.executable, "-m", "fortyfold.launch.mirror", "send", str(source.path), "--once"]
        return subprocess.Popen(command, stdout=subprocess.PIPE)

    monkeypatch.setattr(mirroring, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(remote, "start", start)
    site = parse_site({"kind": "ssh", "hosts": ["gpu1"], "shared": False}, source="the test")
    plan = Plan("there", site, site.shapes(), source.path, None, "python3", {})
    copy, told, until = RunDir(tmp_path / "copy"), list[str](), time.monotonic() + 30
    with mirrored(plan, ["gpu1"], copy, told.append):
        while len(starts) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        source.events().write_text("one\ntwo\n")
        while (not copy.events().exists() or "two" not in copy.events().read_text()) and time.monotonic() < until:
            time.sleep(0.01)
    assert copy.events().read_text() == "one\ntwo\n"
    assert told == ["note: the copy of what gpu1 writes is interrupted (the connection ended); it is tried again"]


@pytest.mark.parametrize("first", [True, False])
def test_what_a_host_has_is_set_aside(source: RunDir, first: bool) -> None:
    if not first:
        source.spec.unlink()
    mirror.main(["set-aside", str(source.path)])
    mirror.main(["set-aside", str(source.path)])
    assert not source.path.exists() and len(list(source.path.parent.glob("source.*"))) == 1
