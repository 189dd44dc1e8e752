"""A whole run on AWS, but for AWS: EC2 is moto's, its instances are hosts with an sshd each (aws_machines.py).

Nothing of fortyfold is replaced. Four spot instances train from their volumes; one hears that it is to be taken away.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aws_stand_in import REGION
from conftest import skip_or_fail
from hosts import Host, hosts
from ssh_hosts import missing_tool

import fortyfold
from fortyfold.spec.aws_site import RUNS_MOUNT
from fortyfold.spec.events import read_events
from fortyfold.spec.ranks import read_merged_steps
from fortyfold.spec.records import last_attempts, read_steps
from fortyfold.spec.run_dir import RunDir

MACHINES = Path(__file__).parents[1] / "aws_machines.py"
BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")  # hosts.py
NUM_HOSTS = 23  # moto's first address is 10.0.0.4, and every instance has another: two gangs of four, six of two
PATIENCE_SECONDS = 400.0
SITE = """
[cloud]
kind = "aws"
region = "{region}"
instance_type = "p3.16xlarge"
ami = "training-*"
key = "mine"
identity = "{folder}/user"
user = "root"
subnets = ["{subnet}"]
private = true
ssh_from = "{address}"
spot = true
nodes = 4
volume = "imagenet"
mount = "{folder}/data"
bootstrap = "there"
python = "{python}"
variables = {{ PYTHONPATH = "{source}", OMP_NUM_THREADS = "1" }}
"""
S3 = 'run_root = "s3://my-bucket/runs"\ninstance_profile = "writes-there"\n'
EFS = 'run_root = "fs-0a1b:/runs"\n'


def wait_until(happens: Callable[[], object], process: "subprocess.Popen[str] | None" = None) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not happens():
        assert time.monotonic() < deadline, "it does not happen"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.1)


class Bench:
    """A machine to command from, and EC2 around it."""

    def __init__(self, client: Host, folder: Path, ready: dict[str, Any]) -> None:
        self.client, self.folder, self.ready = client, folder, ready
        source = Path(fortyfold.__file__).parents[1]
        text = SITE.format(
            region=REGION, folder=folder, subnet=ready["subnet"], address=client.address, python=sys.executable,
            source=source,
        )  # fmt: skip
        others = [text.replace("[cloud]", f"[{name}]") + more for name, more in (("s3", S3), ("efs", EFS))]
        (folder / "sites.toml").write_text("".join([text, *others]))

    def start(self, *arguments: object) -> "subprocess.Popen[str]":
        anybody = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "hush-hush"}
        return self.client.start(
            [sys.executable, "-m", "fortyfold", *map(str, arguments)], cwd=self.folder,
            env={"AWS_ENDPOINT_URL": self.ready["url"], **anybody}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
        return state


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Iterator[Bench]:
    if why := missing_tool():
        skip_or_fail("sshd", why)
    Path("/run/sshd").mkdir(exist_ok=True)
    folder = tmp_path_factory.mktemp("aws")
    folder.chmod(0o755)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "user")], check=True)
    with hosts(NUM_HOSTS + 1) as made, (folder / "machines.log").open("wb") as log:
        *members, client = made
        pairs = [f"{host.address}={host.name}" for host in members]
        machines = client.start(
            [sys.executable, str(MACHINES), str(folder), client.address, *pairs],
            env={"PYTHONPATH": os.pathsep.join(filter(None, [BENCHMARKS, os.environ.get("PYTHONPATH")]))},
            stdout=log,
            stderr=log,
        )
        wait_until((folder / "ready.json").exists, machines)
        ready = json.loads((folder / "ready.json").read_text())
        (folder / "disks" / "efs").mkdir(parents=True)
        for disk in ready["disks"]:
            shutil.copytree(tiny_data, folder / "disks" / disk)
        yield Bench(client, folder, ready)
    with suppress(OSError):  # instances have other disks, but the same folders to mount them at
        Path(RUNS_MOUNT).rmdir()


@pytest.mark.drill
def test_a_spot_notice_saves_all_and_a_new_gang_goes_on(bench: Bench) -> None:
    options = ("--epochs", 60, "--set", "checkpoint.every_steps=40", "--data", bench.folder / "data")
    process = bench.start("train", "tiny", "--on", "cloud", "--yes", *options)
    run_dir = RunDir(bench.folder / "runs/tiny")
    wait_until(run_dir.saved_steps, process)
    (bench.folder / "notice").write_text("2")
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    logs = "".join(path.read_text() for path in sorted(run_dir.logs.glob("job-*.log")))
    assert (process.returncode, err) == (0, ""), out + logs
    assert "note: spot notice; starting again from the last checkpoint" in out
    events = read_events(run_dir.events())
    assert [event["reason"] for event in events if event["kind"] == "stopped"] == ["spot notice"]
    (saved,) = [event["step"] for event in events if event["kind"] == "stopped"]
    assert saved > 0 and [event["step"] for event in events if event["kind"] == "started"] == [0, saved]
    assert events[-1]["kind"] == "finished"
    assert read_merged_steps(run_dir)["step"].tolist() == list(range(480))
    wait_until(lambda: bench.state()["instances"] == ["terminated"] * 8)
    assert bench.state()["groups"] == 0 and bench.state()["volumes"] == ["available"] * 4
    for path in run_dir.path.rglob("*"):
        assert not path.is_file() or b"hush-hush" not in path.read_bytes(), path


@pytest.mark.drill
@pytest.mark.parametrize("site", ["s3", "efs"])
def test_kept_elsewhere_it_goes_on_without_anything_of_this_machine(bench: Bench, site: str) -> None:
    options = (
        "--epochs",
        60,
        "--set",
        "checkpoint.every_steps=40",
        "--data",
        bench.folder / "data",
        "--out",
        f"mine/{site}",
    )
    command = ("train", "tiny", "--on", site, "--nodes", 2, "--yes", *options)
    run_dir = RunDir(bench.folder / f"mine/{site}")

    def starts() -> list[int]:
        return [event["step"] for event in read_events(run_dir.events()) if event["kind"] == "started"]

    def is_saved() -> bool:
        return any(event["kind"] == "saved" for event in read_events(run_dir.events()))

    process = bench.start(*command)
    wait_until(is_saved, process)
    (bench.folder / "notice").write_text("1")
    wait_until(lambda: len(starts()) == 2, process)
    assert starts()[1] >= 40 and run_dir.checkpoint_names() == []
    process.kill()
    process.communicate()
    shutil.rmtree(bench.folder / "mine")
    process = bench.start(*command)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    logs = "".join(path.read_text() for path in sorted(run_dir.logs.glob("job-*.log")))
    assert (process.returncode, err) == (0, ""), out + logs
    assert len(starts()) == 3 and starts()[2] >= starts()[1]
    assert read_events(run_dir.events())[-1]["kind"] == "finished" and run_dir.saved_steps() == 480
    assert last_attempts(read_steps(run_dir.steps()))["step"].tolist() == list(range(480))
    wait_until(lambda: set(bench.state()["instances"]) == {"terminated"})
