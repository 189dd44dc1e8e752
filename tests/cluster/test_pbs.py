"""A run under PBS, or rather its stand-in (tests/pbs_stand_in.py), from qsub to its end."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import apptainer_stand_in
import pytest
from cluster_runs import LONG, LONG_SAVES, call, events_of, takes_steps, wait_until
from pbs_stand_in import TOOLS, install

from fortyfold.spec.run_dir import RunDir

SITE = """
[pbs-test]
kind = "pbs"
interface = "lo"
cpus = 2
procs = 1
python = "{python}"
{more}
variables = {{ PYTHONPATH = "{path}", PATH = "{folder}/container:/usr/bin:/bin" }}
"""


class Bench:
    def __init__(self, folder: Path, more: str = "", tools: tuple[str, ...] = TOOLS, walltime: str = "1:00:00") -> None:
        self.folder = folder
        binaries = install(folder / "pbs", tools, walltime)
        self._environment = {"PATH": f"{binaries}:{os.environ['PATH']}"}
        path = os.environ.get("PYTHONPATH", "")
        (folder / "sites.toml").write_text(SITE.format(more=more, path=path, python=sys.executable, folder=folder))

    def run_dir(self, name: str) -> RunDir:
        return RunDir(self.folder / "runs" / name)

    def call(self, *arguments: object) -> tuple[int, str, str]:
        return call(self.folder, self._environment, *arguments)

    def train(self, name: str, *options: object) -> tuple[int, str, str]:
        return self.call("train", "tiny", "--on", "pbs-test", "--nodes", 2, "--out", f"runs/{name}", *options)

    def qdel(self, job: str) -> int:
        return subprocess.run(["qdel", job], env={**os.environ, **self._environment}).returncode

    def log(self, name: str) -> str:
        return "".join(path.read_text() for path in sorted(self.run_dir(name).logs.glob("job-*.log")))


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Whatever a test left running of its jobs is killed."""
    yield
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdecimal() and str(tmp_path).encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def test_two_nodes_in_a_container_to_the_end(tmp_path: Path) -> None:
    image = apptainer_stand_in.install(tmp_path / "container")
    bench = Bench(tmp_path, f'container = "{image}"')
    code, out, err = bench.train("run", "--watch", "--set", 'log.sinks=["csv"]')
    assert (code, err) == (0, ""), out + bench.log("run")
    assert "note: the sink" not in bench.log("run") and (bench.run_dir("run").path / "points.csv").exists()
    assert "submitted run to pbs-test as job 1.server: 2 nodes of 1 process" in out
    assert out.splitlines()[-1].startswith("run: finished, epoch 3/3")
    started = events_of(bench.run_dir("run"), "started")
    assert [event["ranks"] for event in started] == [2]
    assert image.with_name("image.sif.ran").exists()


def test_an_allocation_of_its_own_by_qsub(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    code, out, err = bench.train("now", "--interactive")
    assert (code, err) == (0, ""), out + bench.log("now")
    assert "test_resnet on 2 ranks" in out and out.splitlines()[-1].startswith("now: finished, epoch 3/3")
    assert (tmp_path / "pbs/state/1/ended").read_text() == "0"


@pytest.mark.drill
def test_out_of_time_it_submits_itself_again_and_stopped_it_stays(tmp_path: Path) -> None:
    """By pbsdsh, which loses exit codes; the time is the queue's."""
    tools = tuple(tool for tool in TOOLS if tool != "pbs_tmrsh")
    bench = Bench(tmp_path, "warn_seconds = 30", tools, walltime="00:00:50")
    code, _, err = bench.train("run", *LONG, *LONG_SAVES, "--epochs", 600)
    assert (code, err) == (0, "")
    run_dir = bench.run_dir("run")
    wait_until(lambda: "out of time; submitted again" in bench.log("run"), lambda: bench.log("run"))
    saved = run_dir.saved_steps()
    assert saved
    wait_until(lambda: takes_steps(run_dir, attempt=2), lambda: bench.log("run"))
    assert re.search(r"pbs job [2-9].server: running", bench.call("runs")[1])
    code, out, err = bench.call("stop", "run")
    assert (code, err) == (0, "") and "run: stopped: " in out, out + err
    assert (run_dir.saved_steps() or 0) > saved
    assert run_dir.ended.read_text().startswith("cancelled\n")
    assert all((job / "ended").exists() for job in (tmp_path / "pbs/state").iterdir())


def test_deleted_by_qdel_it_is_saved_and_stays(tmp_path: Path) -> None:
    """By ssh, where nothing but a connection tells the agents."""
    bench = Bench(tmp_path, tools=("qsub", "qstat", "qdel", "ssh"))
    assert bench.train("run", *LONG, *LONG_SAVES, "--epochs", 600)[0] == 0
    run_dir = bench.run_dir("run")
    wait_until(lambda: takes_steps(run_dir), lambda: bench.log("run"))
    assert bench.qdel("1.server") == 0
    wait_until((tmp_path / "pbs/state/1/ended").exists, lambda: bench.log("run"))
    assert run_dir.saved_steps() and run_dir.ended.read_text().startswith("terminated\n")
    assert not (tmp_path / "pbs/state/2").exists()
    wait_until(lambda: not run_dir.is_locked())
