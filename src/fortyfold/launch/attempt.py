"""One attempt of several ranks on this node: torchrun in a process of its own, from its start to its one line.

However this is left (an exception, Ctrl-C), no process remains: torchrun ends its workers when it is told to, and the
workers die with torchrun, as torchrun does with this process.
"""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from fortyfold.spec.errors import UserError
from fortyfold.spec.failure import Ending, signal_name

POLL_SECONDS = 0.1
TERMINATE_SECONDS = 8.0  # torchrun gives its workers 5
PORT_TRIES = 5
END = signal.SIGUSR2  # as parallel/torchrun.py has it

_Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Rendezvous:
    """Where torchrun's processes of all nodes meet, and which of them this one is."""

    address: str
    port: int
    node: int = 0
    num_nodes: int = 1


def run_attempt(module: str, procs: int, environment: Mapping[str, str], attend: Callable[[], None]) -> Ending:
    """Run `procs` workers, all on this node, to their end; gives how they ended.

    A port that another process took between its choice and its use costs a start of torchrun, and no more.
    """
    for _ in range(PORT_TRIES):
        ending = run_node(module, procs, environment, Rendezvous("127.0.0.1", free_port()), attend)
        if not ending.port_taken:
            break
    return ending


def run_node(
    module: str, procs: int, environment: Mapping[str, str], where: Rendezvous, attend: Callable[[], None]
) -> Ending:
    """Run this node's `procs` workers to their end. `attend` is called about ten times a second; it may raise."""
    with _torchrun(module, procs, where, environment) as process:
        return _read(_attended_output(process, attend), process)


def free_port(allowed: tuple[int, int] | None = None) -> int:
    """A TCP port that nobody listens on now, at any of this host's addresses; of the allowed ones, if not all are."""
    first, last = allowed or (0, 0)
    for port in range(first, last + 1):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise UserError(
        f"{socket.gethostname()}: all ports from {first} to {last} are taken; allow more in the site (ports)"
    )


@contextmanager
def _torchrun(module: str, procs: int, where: Rendezvous, environment: Mapping[str, str]) -> Iterator[_Process]:
    """torchrun, in a session of its own: a Ctrl-C in the terminal is for the launcher alone."""
    options = [
        f"--procs={procs}",
        f"--module={module}",
        f"--nnodes={where.num_nodes}",
        f"--node-rank={where.node}",
        f"--master-addr={where.address}",
        f"--master-port={where.port}",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "fortyfold.parallel.torchrun", *options],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: _Process) -> None:
    try:
        if process.poll() is None:
            process.send_signal(END)
            process.wait(TERMINATE_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _attended_output(process: _Process, attend: Callable[[], None]) -> bytes:
    """All that it writes until it closes its stdout, which it does by ending."""
    assert process.stdout is not None
    descriptor, output = process.stdout.fileno(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            attend()
            if selector.select(POLL_SECONDS):
                block = os.read(descriptor, 1 << 16)
                if not block:
                    return output
                output += block


def _read(output: bytes, process: _Process) -> Ending:
    code = process.wait()
    try:
        return Ending.from_json(json.loads(output))
    except (ValueError, KeyError, TypeError):
        return Ending(trouble=f"torchrun's process {_how(code)}")


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} and without a word"
    return f"was killed by {signal_name(-code)}"
