"""Runs on hosts with a real sshd each (tests/ssh_hosts.py): no shared run directory, and nothing installed there."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import apptainer_stand_in
import kill_resume
import pytest
import torch
from cluster_runs import LONG, PATIENCE_SECONDS, at_terminal, events_of, takes_steps, wait_until
from conftest import skip_or_fail
from ssh_hosts import SshHosts, missing_tool, ssh_hosts

from fortyfold.spec.run_dir import RunDir

MOST_SECONDS_TO_END = 10.0
SAVES = ("--set", "checkpoint.every_steps=20")
SITES = """
[apart]
kind = "ssh"
hosts = ["node0", "node1"]
config = "{config}"
shared = false
bootstrap = "wheel"
python = "{python}"
run_root = "~/my runs"
scratch = "scratch"
secrets = ["CANARY_KEY"]
variables = {{ PIP_NO_INDEX = "1", PIP_NO_DEPS = "1", PYTHONPATH = "{packages}", OMP_NUM_THREADS = "1" }}

[common]
kind = "ssh"
hosts = ["node0", "node1"]
config = "{config}"
shared = false
run_root = "{folder}/common"
scratch = "scratch"
python = "{python}"
container = "{folder}/container/image.sif"
variables = {{ PATH = "{folder}/container:/usr/bin:/bin", OMP_NUM_THREADS = "1" }}

[unknown]
kind = "ssh"
hosts = ["{address}"]

[uneven]
kind = "ssh"
hosts = ["node0", "node1"]
config = "{config}"
shared = false
python = "~/python"
"""
# The interpreter of the second host of `uneven`: less shared memory around it, and another numpy, or so it says.
STRANGE_PYTHON = """#!/bin/bash
exec unshare --mount bash -c '
    mount -t tmpfs -o size=16m none /dev/shm
    PYTHONPATH="$HOME/other" exec {python} "$@"
' -- "$@"
"""
OTHER_NUMPY = "Metadata-Version: 2.1\nName: numpy\nVersion: 1.0\n"
CANARY = "canary-5d41402abc4b2a76"


class Bench:
    def __init__(self, hosts: SshHosts, folder: Path, data: Path) -> None:
        self.hosts, self.folder, self._data = hosts, folder, data
        packages = Path(torch.__file__).parents[1]  # the hosts have no network to install from
        python, address = sys.executable, hosts.members[0].address
        text = SITES.format(config=hosts.config, python=python, packages=packages, address=address, folder=folder)
        apptainer_stand_in.install(folder / "container")
        (folder / "sites.toml").write_text(text)

    def run_dir(self, name: str) -> RunDir:
        return RunDir(self.folder / "runs" / name)

    def start(self, site: str, name: str, *options: object, nodes: int = 2) -> "subprocess.Popen[str]":
        place = ("--data", self._data, "--out", f"runs/{name}")
        return self.command("train", "tiny", "--on", site, "--nodes", nodes, *place, *options)

    def command(
        self, *arguments: object, out: int = subprocess.PIPE, stdin: int | None = None
    ) -> "subprocess.Popen[str]":
        """On the machine that has no sshd."""
        return self.hosts.client.start(
            [sys.executable, "-m", "fortyfold", *map(str, arguments)], env={"CANARY_KEY": CANARY}, cwd=self.folder,
            stdin=stdin, stdout=out, stderr=out,
        )  # fmt: skip

    def train(self, site: str, name: str, *options: object, nodes: int = 2) -> tuple[int, str, str]:
        process = self.start(site, name, *options, nodes=nodes)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        return process.returncode, out, err

    def log(self, name: str) -> str:
        return "".join(path.read_text() for path in sorted(self.run_dir(name).logs.glob("*.log")))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, tiny_shards: Path) -> Iterator[Bench]:
    if why := missing_tool():
        skip_or_fail("sshd", why)
    with ssh_hosts(2, tmp_path_factory.mktemp("ssh")) as hosts:
        yield Bench(hosts, tmp_path_factory.mktemp("work"), tiny_shards)


@pytest.fixture(scope="module")
def calm(bench: Bench) -> RunDir:
    code, out, err = bench.train("apart", "calm", *LONG, *SAVES)
    assert (code, err) == (0, ""), out + bench.log("calm")
    assert sorted(out.splitlines()[:2]) == ["installing fortyfold on node0", "installing fortyfold on node1"]
    return bench.run_dir("calm")


def on_hosts(bench: Bench) -> list[str]:
    """Commands of processes on the hosts that are ours."""
    found = []
    for host in bench.hosts.members:
        for pid in subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True).stdout.split():
            with suppress(OSError):
                command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if "fortyfold" in command and "sshd" not in command:
                    found.append(command)
    return found


def test_all_of_the_run_is_brought_here(bench: Bench, calm: RunDir) -> None:
    there = RunDir(bench.hosts.home(0) / "my runs" / "calm")
    assert calm.checkpoint_names() == there.checkpoint_names()
    assert kill_resume.fingerprint(calm)[1] == list(range(320))
    for rank, home in enumerate((bench.hosts.home(0), bench.hosts.home(1))):
        own = RunDir(home / "my runs" / "calm").steps(rank)
        assert own.read_bytes() == calm.steps(rank).read_bytes()
    assert not (bench.hosts.home(1) / "my runs" / "calm" / "run.json").exists()


def test_each_host_staged_the_data_for_itself(bench: Bench, calm: RunDir, tiny_shards: Path) -> None:
    num_bytes = sum(path.stat().st_size for path in tiny_shards.rglob("*.tar"))
    for rank in range(2):
        (event,) = events_of(calm, "staged", rank)
        assert (event["copied_bytes"], event["there_bytes"]) == (num_bytes, 0)
        root = Path(event["root"])
        assert root.parent == bench.hosts.home(rank) / "scratch" and (root / "train").is_dir()


def test_no_secret_is_written_anywhere(bench: Bench, calm: RunDir) -> None:
    for folder in (bench.folder, bench.hosts.folder):
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix != ".safetensors":
                assert CANARY.encode() not in path.read_bytes(), path


def shell_on(bench: Bench, *arguments: object) -> str:
    """What `fortyfold ssh` shows of a shell that tells its container."""
    typed = "echo in $APPTAINER_CONTAINER; exit"
    return at_terminal(lambda terminal: bench.command("ssh", *arguments, out=terminal, stdin=terminal), typed)


@pytest.mark.parametrize("site", ["apart", pytest.param("common", marks=pytest.mark.drill)])
def test_the_client_is_killed_and_started_again(bench: Bench, calm: RunDir, site: str) -> None:
    """The hosts of `common` share a disk, whatever the site says, and train in a container."""
    name = f"killed-{site}"
    process = bench.start(site, name, *LONG, *SAVES)
    run_dir = bench.run_dir(name)
    wait_until(lambda: process.poll() or (takes_steps(run_dir) and run_dir.saved_steps()), lambda: bench.log(name))
    assert process.poll() is None, process.communicate()
    assert on_hosts(bench)
    if site == "common":
        assert f"in {bench.folder}/container/image.sif" in shell_on(bench, name, "--node", 1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + MOST_SECONDS_TO_END
    while left := on_hosts(bench):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    code, out, err = bench.train(site, name, *LONG, *SAVES)
    assert (code, err) == (0, ""), out + bench.log(name)
    assert "installing" not in out and "going on from step-" in out
    assert len(events_of(run_dir, "started")) == 2
    assert [event["copied_bytes"] for rank in range(2) for event in events_of(run_dir, "staged", rank)] == [0] * 4
    assert kill_resume.fingerprint(run_dir) == kill_resume.fingerprint(calm)


def test_a_host_whose_key_is_unknown_is_refused(bench: Bench) -> None:
    code, _, err = bench.train("unknown", "unknown", nodes=1)
    assert code == 2 and err.count("\n") == 1
    assert f"host {bench.hosts.members[0].address}: Host key verification failed" in err


def test_a_check_names_the_host_that_differs_and_how(bench: Bench, tiny_data: Path) -> None:
    first, second = bench.hosts.home(0), bench.hosts.home(1)
    shutil.copytree(tiny_data, first / "images")
    (second / "other" / "numpy-1.0.dist-info").mkdir(parents=True)
    (second / "other" / "numpy-1.0.dist-info" / "METADATA").write_text(OTHER_NUMPY)
    for home, script in ((first, '#!/bin/bash\nexec {python} "$@"\n'), (second, STRANGE_PYTHON)):
        (home / "python").write_text(script.format(python=sys.executable))
        (home / "python").chmod(0o755)
    with bench.command("sites", "check", "uneven", "--data", "images") as process:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    memory, data, version = out.splitlines()
    assert process.returncode == 2 and all(line.startswith("uneven: node 1 (") for line in out.splitlines()), out + err
    assert "shm has 16 MiB free, and 128 are needed (128 a process); enlarge it" in memory
    assert "the data in images cannot be read: no data folder" in data
    assert " has numpy 1.0, and node 0 (" in version and "all nodes need the same versions" in version
