"""Hosts on one machine: they reach each other at the given rate, can be cut off, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hosts as harness
import pytest
from conftest import skip_or_fail
from hosts import NAMESPACES, PREFIX, Host, hosts

ROOT = Path(__file__).parent.parent

# Takes everything from the first who connects, then says how much.
RECEIVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
taken = 0
while part := connection.recv(1 << 20):
    taken += len(part)
print(taken, flush=True)
"""
# Sends so many bytes; fails when it cannot connect.
SEND = """
import socket, sys
address, port, num_bytes, timeout = sys.argv[1:]
connection = socket.create_connection((address, int(port)), timeout=float(timeout))
connection.settimeout(30)
connection.sendall(bytes(int(num_bytes)))
"""
# Makes two hosts, something that runs in one, and something in a session of its own there; then waits.
MAKER = """
import sys, time
from hosts import hosts
with hosts(2) as (first, second):
    first.start(["sleep", "1000"])
    first.run(["sh", "-c", "setsid sleep 1000 > /dev/null &"])
    print("made", flush=True)
    time.sleep(1000)
"""


@pytest.fixture(scope="module", autouse=True)
def _netns() -> None:
    try:
        with hosts(1):
            pass
    except SystemExit as reason:
        skip_or_fail("netns", str(reason))


def transfer(sender: Host, receiver: Host, num_bytes: int, connect_seconds: float = 30) -> None:
    listener = receiver.start([sys.executable, "-c", RECEIVE, receiver.address], stdout=subprocess.PIPE)
    assert listener.stdout is not None
    goal = [receiver.address, listener.stdout.readline().strip(), str(num_bytes), str(connect_seconds)]
    sender.run([sys.executable, "-c", SEND, *goal], timeout=60)
    assert int(listener.communicate(timeout=60)[0]) == num_bytes


def left_behind(name: str) -> list[str]:
    """Namespaces whose names begin so."""
    return sorted(path.name for path in NAMESPACES.glob(f"{name}*"))


def interfaces() -> str:
    return subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout


def test_each_reaches_each_other_and_nothing_is_seen_outside() -> None:
    before = interfaces()
    with hosts(3) as (one, two, three):
        for sender, receiver in [(one, two), (two, three), (three, one), (one, one)]:
            transfer(sender, receiver, 1_000)
        assert one.run(["ls", "/sys/class/net"]).split() == [one.interface, "lo"]
        assert one.run(["sh", "-c", "echo $PLACE"], env={"PLACE": "here"}) == "here\n"
        assert interfaces() == before


@pytest.mark.parametrize("senders, receivers", [((0, 0), (1, 2)), ((1, 2), (0, 0))], ids=["upload", "download"])
def test_the_rate_is_shared_by_all_that_pass_the_link(senders: tuple[int, ...], receivers: tuple[int, ...]) -> None:
    """Bounded from below only: a slow machine takes longer."""
    with hosts(3, rate="20mbit") as made, ThreadPoolExecutor() as pool:
        started = time.perf_counter()
        for job in [
            pool.submit(transfer, made[sender], made[receiver], 2_000_000)
            for sender, receiver in zip(senders, receivers, strict=True)
        ]:
            job.result()
        assert time.perf_counter() - started > 0.8 * 2 * 2_000_000 * 8 / 20e6


def test_a_cut_host_is_not_reached_until_mended() -> None:
    with hosts(2, rate="1gbit") as (one, two):
        two.cut()
        with pytest.raises(subprocess.CalledProcessError):
            transfer(one, two, 1_000, connect_seconds=0.5)
        two.mend()
        transfer(one, two, 1_000)


def test_two_sets_do_not_meet() -> None:
    with hosts(2) as (one, _), hosts(2) as (_, other), pytest.raises(subprocess.CalledProcessError):
        transfer(one, other, 1_000, connect_seconds=0.5)


@pytest.mark.parametrize("ending", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_when_the_body_raises(ending: type[BaseException]) -> None:
    with pytest.raises(ending), hosts(2) as (one, two):
        name = one.name.removesuffix("0")
        assert len(left_behind(name)) == 3
        inner = two.start(["sh", "-c", "sleep 1000 & wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        raise ending
    assert left_behind(name) == []
    assert inner.returncode == -signal.SIGKILL


def test_nothing_is_left_when_making_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    name, call, seen = f"{PREFIX}-{os.getpid()}-", harness._call, []

    def fail_at_third(*command: str) -> None:
        seen.extend(left_behind(name))
        call(*command, *["oops"] * any(word.endswith("-2") for word in command))

    monkeypatch.setattr(harness, "_call", fail_at_third)
    with pytest.raises(SystemExit, match=r"^`ip .* oops` failed: [^\n]*$"), hosts(3, rate="1gbit"):
        raise AssertionError("made despite a failure")
    assert len(set(seen)) > 2
    assert left_behind(name) == []


def test_after_a_kill_the_next_use_sweeps() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    with subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True, env=env) as maker:
        assert maker.stdout is not None and maker.stdout.readline() == "made\n"
        name = f"{PREFIX}-{maker.pid}-"
        inside = subprocess.run(["ip", "netns", "pids", f"{name}0-0"], capture_output=True, text=True).stdout.split()
        assert len(left_behind(name)) == 3 and len(inside) == 2
        maker.kill()
        os.waitid(os.P_PID, maker.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays in the table
        with hosts(1):
            assert left_behind(name) == []
    assert not any(harness._is_alive(pid) for pid in inside)


def test_a_living_maker_is_left_alone() -> None:
    with hosts(1) as (one,), hosts(1):
        assert left_behind(one.name) == [one.name]


@pytest.mark.parametrize(
    "call, answer, words", [("shutil.which", None, "install iproute2"), ("os.geteuid", 1000, "run it as root")]
)
def test_what_is_missing_is_said_in_a_line(
    call: str, answer: int | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"hosts.{call}", lambda *_: answer)
    with pytest.raises(SystemExit, match=f"^[^\n]*{words}[^\n]*$"), hosts(1):
        pass
