"""Runs under a real Slurm (tests/slurm_cluster.py), from the command that submits them to the weights they leave."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import kill_resume
import pytest
from cluster_runs import LONG, LONG_SAVES, PATIENCE_SECONDS, at_terminal, call, events_of, takes_steps, wait_until
from conftest import skip_or_fail
from slurm_cluster import Cluster, missing_tool, slurm_cluster

from fortyfold.spec.run_dir import RunDir

SITES = """
[slurm-test]
kind = "slurm"
interface = "lo"
cpus = 1
variables = {{ OMP_NUM_THREADS = "1" }}

[hurried]
kind = "slurm"
interface = "lo"
time_limit = "1:00:00"
warn_seconds = 110
variables = {{ OMP_NUM_THREADS = "1" }}

[strange]
kind = "slurm"
interface = "nope0"

[crowded]
kind = "slurm"
interface = "lo"
ports = [{port}, {next_port}]

[gpus]
kind = "slurm"
interface = "lo"
groups = [{{ gpus = 2 }}, {{ gpus = 1 }}]
"""


INTERACTIVE = ("train", "tiny", "--on", "gpus", "--interactive", "--out")
GUIDE = Path(__file__).parents[2] / "docs/guides/sites.md"


class Bench:
    """A folder with sites and data, on a cluster."""

    def __init__(self, cluster: Cluster, folder: Path, data: Path) -> None:
        self.cluster, self.folder, self.data = cluster, folder, data
        self.taken = socket.create_server(("", 0))
        port = self.taken.getsockname()[1]
        (folder / "sites.toml").write_text(SITES.format(port=port, next_port=port + 1))

    def run_dir(self, name: str) -> RunDir:
        return RunDir(self.folder / "runs" / name)

    def call(self, *arguments: object) -> tuple[int, str, str]:
        return call(self.folder, self.cluster.environment, *arguments)

    def train(self, site: str, name: str, *options: object) -> str:
        """Submit; gives the job's number."""
        out = f"runs/{name}"
        code, said, err = self.call("train", "tiny", "--on", site, "--data", self.data, "--out", out, *options)
        assert code == 0, err
        assert "submitted" in said
        return str(json.loads(self.run_dir(name).job.read_text())["id"])

    def log(self, name: str) -> str:
        return "".join(path.read_text() for path in sorted(self.run_dir(name).logs.glob("job-*.log")))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Iterator[Bench]:
    if why := missing_tool():
        skip_or_fail("slurm", why)
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        bench = Bench(cluster, tmp_path_factory.mktemp("work"), tiny_data)
        with bench.taken:
            yield bench


@pytest.fixture(scope="module")
def calm(bench: Bench) -> RunDir:
    """The long run, undisturbed, followed by the verbs that look after runs."""
    job = bench.train("slurm-test", "calm", "--nodes", 2, "--procs", 2, *LONG)
    run_dir = bench.run_dir("calm")
    wait_until(lambda: takes_steps(run_dir), lambda: bench.log("calm"))
    code, out, err = bench.call("train", "tiny", "--on", "slurm-test", "--out", "runs/calm")
    assert (code, out) == (2, "") and f"is slurm job {job} already (running)" in err
    assert f"slurm job {job}: running" in bench.call("runs")[1]
    assert "node=n1" in shell_on(bench, "calm", "--node", "1")
    code, out, err = bench.call("logs", "calm", "--follow")
    assert code == 0 and "training calm in" in out and "test_resnet on 4 ranks" in out
    code, out, err = bench.call("watch", "calm")
    assert (code, err) == (0, "") and out.startswith("calm: finished, epoch 20/20")
    return run_dir


def shell_on(bench: Bench, *arguments: str) -> str:
    """What `fortyfold ssh` shows, with a terminal of our own, of a shell that tells its node."""
    command = [sys.executable, "-m", "fortyfold", "ssh", *arguments]
    environment = {**os.environ, **bench.cluster.environment}

    def start(terminal: int) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command, cwd=bench.folder, env=environment, text=True,
            stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        )  # fmt: skip

    return at_terminal(start, "echo node=$SLURMD_NODENAME; exit")


def preempt(bench: Bench, job: str) -> None:
    """A job that wants all nodes, and may have them."""
    wrap = ("--partition=urgent", "--nodes=4", "--cpus-per-task=4", "--output=/dev/null", "--wrap=sleep 1")
    urgent = bench.cluster.run("sbatch", "--parsable", *wrap).strip()
    wait_until(lambda: bench.cluster.state(job) == "PENDING", lambda: bench.cluster.state(job))
    wait_until(lambda: bench.cluster.state(urgent) in ("COMPLETED", ""))


def run_out_of_time(bench: Bench, job: str, run_dir: RunDir, attempt: int) -> None:
    """Slurm looks at time limits every 30 s; until it has warned, the ranks stand still."""
    events = [events_of(run_dir, "started", rank) for rank in range(4)]
    ranks = [event["process"] for started in events for event in started if event["attempt"] == attempt]
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    bench.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=2")
    wait_until(run_dir.stop_request.exists)
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    wait_until(lambda: bench.cluster.state(job) == "PENDING", lambda: bench.cluster.state(job))
    bench.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")


def submit_array(bench: Bench) -> None:
    """The script of the guide, with a recipe and a site that are here, and without its GPUs."""
    _, _, script = GUIDE.read_text().partition("```bash\n")
    script = re.sub(r"#SBATCH --gpus-per-node.*\n", "", script)
    options = shlex.join(map(str, ("tiny", "--data", bench.data, *LONG, *LONG_SAVES, "--epochs", 40)))
    for theirs, ours in (
        ("resnet50", options),
        ("cluster", "slurm-test"),
        ("fortyfold", f"{sys.executable} -m fortyfold"),
    ):
        script = script.replace(theirs, ours)
    path = bench.folder / "array.sh"
    path.write_text(script.partition("```")[0])
    bench.cluster.run(
        "sbatch", "--array=1-2", f"--chdir={bench.folder}", f"--output={bench.folder}/array-%a.log", str(path)
    )


@pytest.mark.drill
def test_preempted_and_out_of_time_it_is_queued_again_and_ends_alike(bench: Bench, calm: RunDir) -> None:
    job = bench.train("hurried", "disturbed", "--nodes", 2, "--procs", 2, *LONG, *LONG_SAVES)
    submit_array(bench)
    run_dir, *tasks = map(bench.run_dir, ("disturbed", "seed-1", "seed-2"))
    wait_until(lambda: all(map(takes_steps, (run_dir, *tasks))), lambda: bench.log("disturbed"))
    assert re.search(r"node=n[0-3]", shell_on(bench, "seed-1"))
    assert "training seed-1 in" in bench.call("logs", "seed-1")[1]
    preempt(bench, job)
    assert run_dir.saved_steps() and "fortyfold: preempted; queued again" in bench.log("disturbed")
    wait_until(lambda: all(len(events_of(run_dir, "started", rank)) == 2 for rank in range(4)))
    run_out_of_time(bench, job, run_dir, attempt=2)
    assert "fortyfold: out of time; queued again" in bench.log("disturbed")
    assert bench.call("watch", "disturbed")[0] == 0
    assert [event["attempt"] for event in events_of(run_dir, "started")] == [1, 2, 3]
    assert kill_resume.fingerprint(run_dir) == kill_resume.fingerprint(calm)
    wait_until(lambda: all(events_of(task, "finished") for task in tasks), (bench.folder / "array-1.log").read_text)
    assert [len(events_of(task, "started")) for task in tasks] == [2, 2]


def test_who_stops_or_cancels_it_has_it_saved_and_not_queued_again(bench: Bench) -> None:
    names = ("stopped", "cancelled")
    jobs = [bench.train("slurm-test", name, "--nodes", 2, *LONG, *LONG_SAVES, "--epochs", 2000) for name in names]
    stopped, cancelled = map(bench.run_dir, names)
    wait_until(lambda: takes_steps(stopped) and takes_steps(cancelled), lambda: bench.log("stopped"))
    bench.cluster.run("scancel", jobs[1])
    code, out, err = bench.call("stop", "stopped")
    assert (code, err) == (0, "") and "stopped: stopped: cancelled" in out
    assert stopped.saved_steps() and stopped.ended.read_text().startswith("cancelled\n")
    assert bench.cluster.state(jobs[0]) in ("COMPLETED", "FAILED", "")
    assert bench.call("stop", "stopped")[0] == 2
    wait_until(lambda: bench.cluster.state(jobs[1]) == "CANCELLED", lambda: bench.cluster.state(jobs[1]))
    assert cancelled.saved_steps() and json.loads(cancelled.stopped.read_text())["reason"] == "terminated"
    code, out, _ = bench.call("runs")
    assert code == 0 and re.search(r"^cancelled +stopped: terminated ", out, re.MULTILINE)


def in_allocation(bench: Bench, num_gpus: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A command inside an allocation of two nodes with so many GPUs in all."""
    command = [sys.executable, "-m", "fortyfold", *arguments]
    return subprocess.run(
        ["salloc", "--nodes=2", "--ntasks-per-node=1", f"--gpus={num_gpus}", *command], cwd=bench.folder,
        env={**os.environ, **bench.cluster.environment}, capture_output=True, text=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip


def test_nodes_of_unequal_gpus_in_an_allocation_of_ones_own(bench: Bench) -> None:
    done = in_allocation(bench, 3, *INTERACTIVE, "runs/a b")
    assert done.returncode == 0, done.stdout + done.stderr + bench.log("a b")
    assert "test_resnet on 3 ranks" in done.stdout and done.stdout.count("epoch 3/3") == 2
    assert len(events_of(bench.run_dir("a b"), "finished")) == 1


def test_a_check_finds_what_is_wrong(bench: Bench) -> None:
    code, out, err = bench.call("sites", "check", "slurm-test", "--run", "--nodes", 2)
    assert (code, out.splitlines()[-1]) == (0, "slurm-test: ok (2 nodes met, 2 ranks)"), out + err
    lacking = bench.folder / "nowhere"
    code, out, err = bench.call("sites", "check", "slurm-test", "--run", "--nodes", 2, "--data", lacking)
    assert code == 2 and "slurm-test: node 0 (" in out and "node 1 (" in out, out + err
    assert out.count(f"the data in {lacking} cannot be read") == 2
    code, out, err = bench.call("sites", "check", "strange", "--run", "--nodes", 2)
    assert code == 2 and "strange: " in out and "nope0" in out, out + err
    port = bench.taken.getsockname()[1]
    with ExitStack() as taken:
        with suppress(OSError):  # somebody else has it
            taken.enter_context(socket.create_server(("", port + 1)))
        code, out, err = bench.call("sites", "check", "crowded", "--run", "--nodes", 2)
    assert code == 2 and f"all ports from {port} to {port + 1} are taken" in out, out + err
    assert not list(bench.folder.glob("runs/.check-*"))


def test_a_world_that_is_not_the_planned_one_is_refused(bench: Bench) -> None:
    done = in_allocation(bench, 2, "sites", "check", "gpus", "--run")
    assert done.returncode == 2 and done.stdout.startswith("gpus: 2 GPUs were found ("), done.stdout + done.stderr
    assert "and 3 ranks were planned" in done.stdout
    done = in_allocation(bench, 2, *INTERACTIVE, "runs/unfit")
    assert done.returncode == 2
    assert "2 GPUs were found (" in done.stderr and "and 3 ranks were planned" in done.stderr
    assert not bench.run_dir("unfit").exists


@pytest.mark.drill
def test_the_demo_reaches_95_per_cent(bench: Bench) -> None:
    code, out, err = bench.call("train", "smoke", "--on", "slurm-test", "--nodes", 2, "--procs", 2, "--watch")
    assert (code, err) == (0, ""), out + bench.log("smoke")
    (top1,) = re.findall(r"^smoke: finished, epoch 6/6, top-1 ([\d.]+) % \(1000 images\)$", out, re.MULTILINE)
    assert float(top1) >= 95
