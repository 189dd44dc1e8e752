"""A real Slurm on this machine: a controller and four nodes, with a munge of its own, in a folder of its own.

Nodes n0 … n3 have 4 CPUs each in Slurm's books; n0 has two devices that it takes for GPUs, n1 one. Ports are free ones.
Partition `main` is everybody's; jobs of `urgent` preempt those of `main`, which get 60 s of grace and are requeued, to
start again once a credential has expired (15 s).
Whatever ends the `with`, the daemons and what they run are killed.
"""

import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NODES = ("n0", "n1", "n2", "n3")
PATIENCE_SECONDS = 60.0
TOOLS = ("slurmctld", "slurmd", "munged", "sbatch")

CONF = """\
ClusterName=fortyfold
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node-%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/node-%n.log
SlurmctldParameters=enable_configless
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=100000
SchedulerType=sched/backfill
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait=30
MinJobAge=300
SlurmctldTimeout=30
SlurmdTimeout=60
InactiveLimit=0
GresTypes=gpu
SrunPortRange=0-0
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        """One of Slurm's commands; gives what it prints."""
        done = subprocess.run(command, env={**os.environ, **self.environment}, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """The job's state in full letters; empty when it is known no more."""
        line = subprocess.run(
            ["scontrol", "show", "job", "--oneliner", job],
            env={**os.environ, **self.environment}, capture_output=True, text=True,
        ).stdout  # fmt: skip
        return line.partition("JobState=")[2].partition(" ")[0]


def missing_tool() -> str | None:
    if os.geteuid() != 0:
        return "only root starts a Slurm of its own"
    absent = [tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    return f"{absent[0]} is not installed (slurm-wlm, munge)" if absent else None


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster that has come up."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        _start_munge(folder, processes)
        _configure(folder)
        _start(processes, folder, "slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for name in NODES:
            _start(processes, folder, "slurmd", "-D", "-N", name, "-f", str(folder / "slurm.conf"))
        cluster = Cluster(folder)
        _await_nodes(cluster)
        yield cluster
    finally:
        _end(folder, processes)


def _start_munge(folder: Path, processes: list["subprocess.Popen[bytes]"]) -> None:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    folder.chmod(0o755)
    _start(
        processes, folder, "munged", "--foreground", "--force", f"--key-file={key}",
        f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log",
        f"--seed-file={folder}/munged.seed",
    )  # fmt: skip
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (folder / "munge.socket").exists():
        assert time.monotonic() < deadline, (folder / "munged.log").read_text()
        time.sleep(0.05)


def _configure(folder: Path) -> None:
    ports, host = _free_ports(len(NODES) + 1), socket.gethostname().partition(".")[0]
    gpus = {"n0": 2, "n1": 1}
    lines, gres = [], []
    for name, port in zip(NODES, ports[1:], strict=True):
        (folder / f"spool-{name}").mkdir()
        wants = f" Gres=gpu:{gpus[name]}" if name in gpus else ""
        lines.append(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=2000{wants}"
        )
        for number in range(gpus.get(name, 0)):
            device = folder / f"{name}-gpu{number}"
            os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
            gres.append(f"NodeName={name} Name=gpu File={device}")
    (folder / "state").mkdir()
    (folder / "gres.conf").write_text("\n".join(gres) + "\n")
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    conf = CONF.format(host=host, folder=folder, controller_port=ports[0], nodes="\n".join(lines))
    (folder / "slurm.conf").write_text(conf)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _start(processes: list["subprocess.Popen[bytes]"], folder: Path, *command: str) -> None:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    with (folder / "daemons.log").open("ab") as log:
        processes.append(
            subprocess.Popen(
                command,
                env={**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        )


def _await_nodes(cluster: Cluster) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    command = ["sinfo", "--noheader", "--partition=main", "--format=%T %D"]
    while True:
        done = subprocess.run(command, env={**os.environ, **cluster.environment}, capture_output=True, text=True)
        if done.stdout.split() == ["idle", str(len(NODES))]:
            return
        logs = (cluster.folder / "daemons.log").read_text(errors="replace")
        assert time.monotonic() < deadline, f"{done.stdout}{done.stderr}{logs}"
        time.sleep(0.2)


def _end(folder: Path, processes: list["subprocess.Popen[bytes]"]) -> None:
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            ["scancel", "--full", "--signal=KILL", "--user=root"],
            env={**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}, capture_output=True, timeout=20,
        )  # fmt: skip
    for pid in _steps(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in reversed(processes):
        process.kill()
        process.wait()


def _steps(folder: Path) -> list[int]:
    """Everything that was started with this cluster's configuration: step daemons, and what jobs run."""
    mark = f"SLURM_CONF={folder / 'slurm.conf'}".encode()
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            with suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
    return found
