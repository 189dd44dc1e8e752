"""Ranks that are stopped or cut off: the others end within the deadline, say whom they miss, and the run can go on.

Three hosts with a rank each (benchmarks/hosts.py) share a run, and each test goes on with what the last one left.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import skip_or_fail, start
from hosts import Host, hosts

from fortyfold.launch.attempt import END
from fortyfold.launch.environment import JOB, train_job
from fortyfold.spec.events import Event, last_attempt, read_events
from fortyfold.spec.failure import Ending, Failure
from fortyfold.spec.recipe_file import load_recipe
from fortyfold.spec.run_dir import RunDir

NUM_HOSTS = 3
DEADLINE_SECONDS = 6.0
MARGIN_SECONDS = 8.0  # "and a few seconds" on a busy machine, the end of torchrun included
PATIENCE_SECONDS = 120.0
SAVES = {"checkpoint.every_steps": 4, "checkpoint.keep": 2, "evaluate.every_epochs": 0}

Torchruns = list["subprocess.Popen[str]"]


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def started(run_dir: RunDir, rank: int) -> Event:
    """The last start of a rank."""
    return [event for event in read_events(run_dir.events(rank)) if event["kind"] == "started"][-1]


def saved_by(run_dir: RunDir, attempt: int) -> list[str]:
    return [name for name in run_dir.checkpoint_names() if name.endswith(f"-{attempt:04d}")]


class Cluster:
    """A run on hosts, one rank each, started again and again."""

    def __init__(self, members: list[Host], run_dir: RunDir, data: Path) -> None:
        self.members, self.run_dir, self._port = members, run_dir, 29500
        changes = {"data.root": str(data), "data.demo": None, "epochs": 1000, **SAVES}
        recipe = load_recipe("tiny", {**changes, "strategy.deadline_seconds": DEADLINE_SECONDS})
        self._environment = {
            JOB: json.dumps(train_job(recipe, run_dir.path, [])),
            "GLOO_SOCKET_IFNAME": Host.interface,
            "OMP_NUM_THREADS": "1",
        }

    def start(self) -> Torchruns:
        """torchrun on every host; back when the ranks have trained, and saved."""
        before = last_attempt(read_events(self.run_dir.events()))
        self._port += 1
        torchruns = [self._start(number, host) for number, host in enumerate(self.members)]
        wait_until(lambda: saved_by(self.run_dir, before + 1) or any(each.poll() is not None for each in torchruns))
        assert saved_by(self.run_dir, before + 1), [each.communicate()[0] for each in torchruns if each.poll()]
        events = read_events(self.run_dir.events())
        resumed = [event["checkpoint"] for event in events if event["kind"] == "resumed"]
        assert len(resumed) == before, "it did not go on from its checkpoint"
        return torchruns

    def _start(self, number: int, host: Host) -> "subprocess.Popen[str]":
        place = [f"--node-rank={number}", f"--master-addr={self.members[0].address}", f"--master-port={self._port}"]
        options = ["--procs=1", f"--nnodes={NUM_HOSTS}", *place, "--module=fortyfold.api.worker"]
        command = [sys.executable, "-m", "fortyfold.parallel.torchrun", *options]
        return host.start(command, self._environment, stdout=subprocess.PIPE)

    def running(self) -> list[str]:
        """The processes that are left, on any host."""
        found = [
            subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True).stdout
            for host in self.members
        ]
        return " ".join(found).split()


@pytest.fixture(scope="module")
def cluster(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        with hosts(NUM_HOSTS) as members:
            yield Cluster(members, RunDir(tmp_path_factory.mktemp("lost") / "run"), tiny_data)
    except SystemExit as reason:
        skip_or_fail("netns", str(reason))


def failure_of(torchrun: "subprocess.Popen[str]", seconds: float) -> Failure:
    """How the worker of a node ended, which it must do in so many seconds."""
    assert torchrun.stdout is not None
    assert select.select([torchrun.stdout], [], [], seconds)[0], "it has not ended"
    (failure,) = Ending.from_json(json.loads(torchrun.communicate(timeout=PATIENCE_SECONDS)[0])).failures
    return failure


def failures_of(torchruns: Torchruns) -> list[Failure]:
    end = time.monotonic() + DEADLINE_SECONDS + MARGIN_SECONDS
    return [failure_of(torchrun, max(0.0, end - time.monotonic())) for torchrun in torchruns]


def test_a_rank_that_is_stopped(cluster: Cluster) -> None:
    first, second, third = cluster.start()
    os.kill(started(cluster.run_dir, 1)["process"], signal.SIGSTOP)
    for failure in failures_of([first, third]):
        assert failure.ranks == (1,) and "rank 1" in failure.message, failure
    second.send_signal(END)  # as a launcher does when a node has failed
    assert "got signal: 12" in second.communicate(timeout=PATIENCE_SECONDS)[0]
    assert not cluster.running()


def test_a_host_that_is_cut_off(cluster: Cluster) -> None:
    first, second, third = cluster.start()
    cluster.members[2].cut()
    try:
        alone, *others = failures_of([third, first, second])
    finally:
        cluster.members[2].mend()
    for failure in others:
        assert failure.ranks == (2,) and "rank 2" in failure.message, failure
    assert alone.rank == 2 and "has not reached" in alone.message, alone
    assert not cluster.running()


def test_the_first_host_is_cut_off(cluster: Cluster) -> None:
    """That of the store. Its rank cannot know that it is alone; the others cannot know whether they are."""
    torchruns = cluster.start()
    cluster.members[0].cut()
    try:
        alone, *others = failures_of(torchruns)
    finally:
        cluster.members[0].mend()
    assert alone.ranks == (1, 2), alone
    for failure in others:
        assert "has not reached" in failure.message and "on node 0" in failure.message, failure
    assert not cluster.running()


def test_a_stopped_rank_on_one_host_is_replaced(tiny_data: Path, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    changes = [f"{key}={value}" for key, value in (SAVES | {"strategy.deadline_seconds": 4}).items()]
    options = [part for change in changes for part in ("--set", change)]
    command = ("train", "tiny", "--data", tiny_data, "--out", run_dir.path, "--procs", 2, "--epochs", 6, *options)
    with start(*command) as process:
        try:
            wait_until(lambda: saved_by(run_dir, 1) or process.poll() is not None)
            os.kill(stopped := started(run_dir, 0)["process"], signal.SIGSTOP)
            out, err = process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            process.kill()
    assert (process.returncode, err) == (0, "")
    (note,) = [line for line in out.splitlines() if line.startswith("note: ")]
    assert note.startswith("note: rank 0 was lost: no sign of life for 4 s (")
    assert note.endswith("; starting again from the last checkpoint (attempt 2)")
    assert not Path("/proc", str(stopped)).exists()
