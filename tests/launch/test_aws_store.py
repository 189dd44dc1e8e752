"""A run's copy on S3 (moto's): it follows, outlives the disk it was made from, and is brought back whole."""

import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aws_hosts import make_site, plan_for
from aws_stand_in import REGION, Cloud

from fortyfold.launch.aws import lease, store
from fortyfold.launch.aws.lease import Lease
from fortyfold.launch.aws.store import Store, keeping, keeping_records, open_store
from fortyfold.launch.plan import Plan
from fortyfold.spec.errors import UserError
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag

ROOT = "s3://my-bucket/some-runs"
URL = f"{ROOT}/run"


@pytest.fixture
def bucket(ec2: Cloud, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(store, "LOOK_SECONDS", 0.01)
    ec2.s3.create_bucket(Bucket="my-bucket")
    return open_store(URL, REGION)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    run_dir = RunDir(tmp_path / "here" / "run")
    run_dir.logs.mkdir(parents=True)
    run_dir.spec.write_text('{"attempt": 1}')
    for rank in range(2):
        run_dir.events(rank).write_text("one\n")
    return replace(plan_for(make_site(run_root=ROOT, instance_profile="writes-there")), run=run_dir.path)


def save(run_dir: RunDir, step: int) -> None:
    beside = run_dir.path / "beside"
    beside.mkdir()
    for name in ("training.safetensors", "model.safetensors", "manifest.json"):
        (beside / name).write_bytes(bytes([step]) * 1000)
    run_dir.checkpoints.mkdir(exist_ok=True)
    beside.rename(run_dir.checkpoint(step, 1))


def keep(plan: Plan, stop: StopFlag | None = None, told: list[dict[str, Any]] | None = None) -> Any:
    return keeping(plan, stop or StopFlag(), (told if told is not None else []).append)


def wait_for(happens: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not happens():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.02)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def bring_back(folder: Path, *options: str) -> RunDir:
    run_dir = RunDir(folder / "back")
    assert store.main(["fetch", str(run_dir.path), URL, REGION, *options]) == 0
    return run_dir


def test_it_follows_and_is_brought_back(bucket: Store, plan: Plan, tmp_path: Path) -> None:
    run_dir = RunDir(plan.run)
    with keep(plan):
        assert "run.json" in bucket.sizes()  # before anything is trained
        save(run_dir, 1)
        wait_for(lambda: "checkpoints/step-000000001-0001/manifest.json" in bucket.sizes())
        save(run_dir, 2)
        shutil.rmtree(run_dir.checkpoint(1, 1))
        run_dir.events().write_text("one\ntwo\n")
    assert bucket.sizes() == {path: len(data) for path, data in files(run_dir.path).items()}
    back = bring_back(tmp_path)
    assert files(back.path) == files(run_dir.path)
    assert files(bring_back(tmp_path).path) == files(run_dir.path)


def test_other_nodes_have_their_records(bucket: Store, plan: Plan, tmp_path: Path) -> None:
    with keep(plan):
        save(RunDir(plan.run), 1)
    other = replace(plan, run=tmp_path / "other" / "run")
    theirs = RunDir(other.run)
    theirs.path.mkdir(parents=True)
    theirs.events(0).write_text("")  # as it was before
    theirs.events(1).write_text("one\nmore\n")
    with keeping_records(other, print):
        pass
    back = bring_back(tmp_path, "--only", "records")
    assert files(back.path) == {"events-00000.jsonl": b"one\n", "events-00001.jsonl": b"one\nmore\n"}


def test_a_checkpoint_that_is_not_whole_is_not_brought_back(bucket: Store, plan: Plan, tmp_path: Path) -> None:
    with keep(plan):
        save(RunDir(plan.run), 1)
        save(RunDir(plan.run), 2)
    bucket.remove("checkpoints/step-000000002-0001/manifest.json")  # as a node leaves it that is gone too soon
    assert bring_back(tmp_path).checkpoint_names() == ["step-000000001-0001"]
    with keep(plan):
        pass
    assert bring_back(tmp_path).checkpoint_names() == ["step-000000002-0001", "step-000000001-0001"]


def test_a_trouble_that_passes_is_a_note(bucket: Store, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    send, refused, told = Store.send, list[str](), list[dict[str, Any]]()

    def refuse(self: Store, path: str, source: Path) -> None:
        if len(refused) in (0, 1, 5):
            refused.append(path)
            raise UserError("AWS: upload_fileobj: SlowDown: please")
        refused.append(path)
        send(self, path, source)

    monkeypatch.setattr(Store, "send", refuse)
    monkeypatch.setattr(store, "ROUND_SECONDS", 0.05)
    monkeypatch.setattr(store, "AGAIN_SECONDS", 0.05)
    with keep(plan, told=told):
        save(RunDir(plan.run), 1)
        wait_for(lambda: "checkpoints/step-000000001-0001/manifest.json" in bucket.sizes())
        save(RunDir(plan.run), 2)
    note = {"note": "AWS: upload_fileobj: SlowDown: please; it is tried again"}
    assert told == [note, note, {"keeping": True}] or told == [note, {"keeping": True}, note]
    assert "checkpoints/step-000000002-0001/manifest.json" in bucket.sizes()


def test_an_end_that_cannot_be_kept_is_told(bucket: Store, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(store, "FINISH_SECONDS", 0.2)
    monkeypatch.setattr(store, "AGAIN_SECONDS", 0.05)
    with keep(plan, told=told):
        monkeypatch.setattr(Store, "write", refuse_all)
        RunDir(plan.run).events().write_text("one\ntwo\n")
    assert told[-1] == {"unkept": True} and {"keeping": True} in told


def refuse_all(*arguments: object) -> None:
    raise UserError("AWS: AccessDenied")


def test_what_cannot_be_removed_is_no_more_than_a_note(
    bucket: Store, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    run_dir = RunDir(plan.run)
    monkeypatch.setattr(Store, "remove", refuse_all)
    monkeypatch.setattr(store, "ROUND_SECONDS", 0.05)
    with keep(plan, told=told):
        save(run_dir, 1)
        wait_for(lambda: "checkpoints/step-000000001-0001/manifest.json" in bucket.sizes())
        save(run_dir, 2)
        shutil.rmtree(run_dir.checkpoint(1, 1))
        wait_for(lambda: bool(told))
        time.sleep(0.3)
    assert told == [{"note": "AWS: AccessDenied; it is tried again"}, {"keeping": True}]


class Gone(Exception):
    """The node is taken away."""


@pytest.mark.parametrize("calls", range(12))
def test_wherever_it_is_cut_short_a_whole_checkpoint_is_there(
    bucket: Store, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Whatever the host prunes meanwhile: it keeps one, and saves another while one is being sent."""
    run_dir, left = RunDir(plan.run), [calls]
    with keep(plan):
        save(run_dir, 1)
    save(run_dir, 2)
    shutil.rmtree(run_dir.checkpoint(1, 1))

    def counted(call: Callable[..., None]) -> Callable[..., None]:
        def work(*arguments: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Gone
            if left[0] == calls - 2:
                save(run_dir, 3)
                shutil.rmtree(run_dir.checkpoint(2, 1))
            call(*arguments)

        return work

    with monkeypatch.context() as patched, suppress(Gone):
        for name in ("send", "remove"):
            patched.setattr(Store, name, counted(getattr(Store, name)))
        keeper = store._Keeper(run_dir, bucket, "all", lambda words: None)
        for _ in range(2):
            keeper.send()
            keeper.prune()
    back = bring_back(tmp_path)
    assert back.checkpoint_names()
    for name in back.checkpoint_names():
        content = bytes([int(name.split("-")[1])]) * 1000
        wanted = ("training.safetensors", "model.safetensors", "manifest.json")
        assert files(back.checkpoints / name) == dict.fromkeys(wanted, content)


def test_who_may_not_write_hears_of_it_at_once(ec2: Cloud, plan: Plan) -> None:
    complaint = r"^AWS: put_object: NoSuchBucket: .*; see run_root in the site$"
    with pytest.raises(UserError, match=complaint), keep(plan):
        raise AssertionError


def test_what_went_wrong_inside_is_the_news(bucket: Store, plan: Plan) -> None:
    with pytest.raises(UserError, match=r"^bad input$"), keep(plan):
        save(RunDir(plan.run), 1)
        raise UserError("bad input")
    assert "checkpoints/step-000000001-0001/manifest.json" in bucket.sizes()


def test_one_that_is_in_the_way_is_moved(
    bucket: Store, plan: Plan, ec2: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    with keep(plan):
        save(RunDir(plan.run), 1)
    before, move, moved_paths = bucket.sizes(), Store.move, list[str]()

    def cut_short(self: Store, path: str, other: Store) -> None:
        if len(moved_paths) == 4:
            raise UserError("AWS: copy: SlowDown")
        moved_paths.append(path)
        move(self, path, other)

    monkeypatch.setattr(Store, "move", cut_short)
    assert store.main(["set-aside", str(plan.run), URL, REGION]) == 2
    assert "run.json" in bucket.sizes()
    monkeypatch.setattr(Store, "move", move)
    for _ in range(2):
        assert store.main(["set-aside", str(plan.run), URL, REGION]) == 0
    assert bucket.sizes() == {}
    moved = [each["Key"] for each in ec2.s3.list_objects_v2(Bucket="my-bucket")["Contents"]]
    assert all(key.startswith("some-runs/run.20") for key in moved)
    assert sorted(key.split("/", 2)[2] for key in moved) == sorted(before)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LIFE_SECONDS", 0.05), ("GONE_SECONDS", 0.6), ("POLL_SECONDS", 0.15)):
        monkeypatch.setattr(lease, name, seconds)


@pytest.mark.usefixtures("impatient")
def test_one_gang_at_a_time(bucket: Store, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    told = f"{URL} is being trained by {socket.gethostname()}; stop that one first"
    with keep(plan):
        with pytest.raises(UserError, match=f"^{told}$"), keep(plan):
            raise AssertionError
        assert store.main(["set-aside", str(plan.run), URL, REGION]) == 2
        assert capsys.readouterr().err.endswith(f"for a sign of life\nfortyfold: {told}\n")
    with keep(plan):
        pass


@pytest.mark.usefixtures("impatient")
def test_who_is_gone_is_followed_and_hears_of_it(bucket: Store, plan: Plan) -> None:
    gone = Lease(bucket.client, bucket.bucket, bucket.folder)
    gone.take()
    with keep(plan):
        gone.show_life(threading.Event())
        gone.release()
        assert gone.lost
        assert bucket.client("head_object", Bucket=bucket.bucket, Key=f"{bucket.folder}.holder")  # it is not theirs


@pytest.mark.usefixtures("impatient")
def test_a_run_that_was_taken_over_stops_and_leaves_the_other_alone(bucket: Store, plan: Plan) -> None:
    stop, told = StopFlag(), list[dict[str, Any]]()
    with keep(plan, stop, told):
        bucket.client("put_object", Bucket=bucket.bucket, Key=f"{bucket.folder}.holder", Body=b"mine")
        wait_for(lambda: stop.requested)
        save(RunDir(plan.run), 1)
    assert "checkpoints/step-000000001-0001/manifest.json" not in bucket.sizes()
    assert stop.reason == "taken over" and told[-1] == {"unkept": True}
    assert told[0] == {"note": f"{URL} was taken over by somebody else; this run stops"}


def test_an_answer_that_is_lost_loses_nothing(bucket: Store) -> None:
    one = Lease(bucket.client, bucket.bucket, bucket.folder)
    one.take()
    before = one._version
    assert one._write(IfMatch=before)
    assert one._version != before and one._write(IfMatch=before)  # as if S3 had not heard of the second
    assert one._write(IfMatch=one._version)


def test_without_s3_there_is_nothing_to_keep(plan: Plan) -> None:
    with keep(replace(plan, site=make_site())), keeping_records(replace(plan, site=make_site()), print):
        pass
    assert replace(plan, site=make_site(run_root="fs-0a1b:/runs")).store is None


def test_folders_of_the_console_are_passed_over(bucket: Store, plan: Plan, tmp_path: Path, ec2: Cloud) -> None:
    with keep(plan):
        save(RunDir(plan.run), 1)
    for name in ("", "logs/", "checkpoints/", "checkpoints/x/", "somebody's.txt"):
        ec2.s3.put_object(Bucket="my-bucket", Key=f"{bucket.folder}/{name}", Body=b"")
    assert files(bring_back(tmp_path).path) == files(plan.run)


def test_its_mistakes_are_one_line(ec2: Cloud, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert store.main(["fetch", str(tmp_path / "run"), URL, REGION]) == 2
    assert capsys.readouterr().err.startswith("fortyfold: AWS: put_object: NoSuchBucket")
