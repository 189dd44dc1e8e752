"""Several hosts on one machine: network namespaces on a switch of their own, each behind a link of a given rate.

    with hosts(4, rate="200mbit") as (first, second, *others):
        server = first.start(["python3", "serve.py", first.address])
        second.run(["ping", "-c", "1", first.address])

The rate holds for each direction of each link, so n hosts that send in a circle all get it; TCP gets about 95 % of it.
The switch is in a namespace, too: nothing is seen of it outside, no address or firewall of this machine plays a part,
and the hosts reach each other only. File system, processors and process ids are shared.

Whatever ends the `with`, everything started in it is killed and everything made is gone. After a kill -9 of its maker
that is done by the next `hosts()` on the machine. Needs Linux, root and iproute2; else SystemExit says what is missing.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

NAMESPACES = Path("/var/run/netns")
PREFIX = "fortyfold"
SETS = count()  # of hosts, made by this process
# A burst holds two GSO packets of 64 kB, which tbf would cut up otherwise; the queue is that of a switch's port. With
# less of either TCP does not reach the rate; with much more, packets wait for longer than in a machine room.
BURST, LATENCY = "128kb", "20ms"


class Host:
    """One of them. `address` and `interface` are its own on the network that the hosts share."""

    interface = "eth0"

    def __init__(self, set_name: str, number: int) -> None:
        self.name = f"{set_name}-{number}"
        self.address = f"10.0.0.{number + 1}"
        self._switch, self._port = f"{set_name}-switch", f"port{number}"
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[str]":
        """Popen in this host, in a process group of its own; `env` is added to the environment."""
        process: subprocess.Popen[str] = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            env={**os.environ, **(env or {})}, process_group=0, text=True, **options,
        )  # fmt: skip
        self._started.append(process)
        return process

    def run(self, command: Sequence[str], env: Mapping[str, str] | None = None, timeout: float | None = None) -> str:
        """What the command and its children print until all have ended; CalledProcessError when it fails."""
        process = self.start(command, env, stdout=subprocess.PIPE)
        out, _ = process.communicate(timeout=timeout)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, list(command), out)
        return out

    def cut(self) -> None:
        """Pulls its cable at the switch: from now on packets are lost, and nobody is told."""
        _call("ip", "-n", self._switch, "link", "set", self._port, "down")

    def mend(self) -> None:
        _call("ip", "-n", self._switch, "link", "set", self._port, "up")

    def make(self, rate: str | None) -> None:
        """The namespace, and its link to the switch. Upload is limited at this end, download at the other."""
        _call("ip", "netns", "add", self.name)
        peer = ("type", "veth", "peer", self.interface, "netns", self.name)
        _call("ip", "-n", self._switch, "link", "add", self._port, *peer)
        for namespace, interface in [(self.name, self.interface), (self._switch, self._port)]:
            if rate is not None:
                tbf = ("tbf", "rate", rate, "burst", BURST, "latency", LATENCY)
                _call("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *tbf)
            _call("ip", "-n", namespace, "link", "set", interface, "addrgenmode", "none")  # no IPv6 beside it
        _call("ip", "-n", self._switch, "link", "set", self._port, "master", "switch", "up")
        _call("ip", "-n", self.name, "address", "add", f"{self.address}/24", "dev", self.interface)
        for interface in ("lo", self.interface):
            _call("ip", "-n", self.name, "link", "set", interface, "up")

    def end_processes(self) -> None:
        """Kills what was started here and waits for it; its pipes are closed."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        kill_inside(self.name)
        for process in self._started:
            with suppress(BrokenPipeError), process:
                pass


@contextmanager
def hosts(number: int, rate: str | None = None) -> Iterator[list[Host]]:
    """That many hosts, linked at `rate` (tc's words: 1gbit, 200mbit; None: as fast as the machine copies)."""
    _check_tools()
    _sweep()
    set_name = f"{PREFIX}-{os.getpid()}-{next(SETS)}"
    made = [Host(set_name, place) for place in range(number)]
    try:
        _make_switch(f"{set_name}-switch")
        for host in made:
            host.make(rate)
        yield made
    finally:
        for host in made:
            host.end_processes()
        for name in _namespaces(set_name):
            _remove(name)


def _check_tools() -> None:
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise SystemExit(f"hosts on one machine need `{tool}`: install iproute2 (Linux only)")
    if os.geteuid() != 0:
        raise SystemExit("hosts on one machine are network namespaces, and only root makes those: run it as root")


def _make_switch(namespace: str) -> None:
    _call("ip", "netns", "add", namespace)
    _call("ip", "-n", namespace, "link", "add", "switch", "type", "bridge")
    _call("ip", "-n", namespace, "link", "set", "switch", "addrgenmode", "none", "up")


def _sweep() -> None:
    """Removes the namespaces whose makers are gone."""
    for name in _namespaces(PREFIX):
        if not _is_alive(name.split("-")[1]):
            _remove(name)


def _is_alive(pid: str) -> bool:
    """An ended process whose parent has not noticed yet is still in the table, with nothing in it."""
    try:
        return Path("/proc", pid, "cmdline").read_bytes() != b""
    except (FileNotFoundError, ProcessLookupError):
        return False


def _remove(namespace: str) -> None:
    """Takes what is inside along. Another process may be removing it, too."""
    kill_inside(namespace)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def _namespaces(set_name: str) -> list[str]:
    return sorted(path.name for path in NAMESPACES.glob(f"{set_name}-*"))


def kill_inside(namespace: str) -> None:
    """Kills every process there, also those that left the group in which they were started."""
    while pids := subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"`{' '.join(command)}` failed: {' '.join(done.stderr.split())}")
