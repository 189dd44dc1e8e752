"""How the nodes of a run find each other: the first one waits at an address, and the others are told of it.

The first node chooses the address itself, since a name that others resolve may lead nowhere (`-ib` names, a second
network card, a loopback entry in /etc/hosts), and a port that is free there. It writes an invitation: a file that only
the user reads, on the disk that the nodes share, or a line that the ssh launcher passes on. Who comes must know the
token in it. An invitation bears the job's name and which start of it this is, so that an old one is never followed.
"""

import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fortyfold.launch.attempt import free_port
from fortyfold.launch.link import Closed, Link
from fortyfold.launch.network import own_addresses
from fortyfold.spec.errors import RunFailed
from fortyfold.spec.run_dir import write_atomically

PATIENCE_SECONDS = 300.0  # nodes of a job start minutes apart, and network disks show new files late
CONNECT_SECONDS = 5.0
POLL_SECONDS = 0.1

Attend = Callable[[], None]


@dataclass(frozen=True)
class Invitation:
    addresses: tuple[str, ...]
    port: int
    token: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Invitation":
        return cls(tuple(value["addresses"]), int(value["port"]), str(value["token"]))


@dataclass(frozen=True)
class Meeting:
    """How the nodes are brought together: by a file on the disk that they share, or by the ssh launcher."""

    publish: Callable[[Invitation], None]
    await_invitation: Callable[[Attend], Invitation]
    note_end: Callable[[str], None]
    start: str = ""
    """Which start of the job this is."""
    tell: Callable[[dict[str, Any]], None] = lambda words: note(words["note"]) if "note" in words else None
    """Something to the ssh launcher (launch/wire.py); without one, notes are for the log."""


def note(text: str) -> None:
    """For the log, if there is still one."""
    with suppress(OSError):
        print(f"note: {text}", file=sys.stderr, flush=True)


@contextmanager
def invite(
    interface: str | None, ports: tuple[int, int] | None, publish: Callable[[Invitation], None]
) -> Iterator["Reception"]:
    """On the first node: open the door, and tell where it is."""
    with socket.create_server(("", free_port(ports)), backlog=128) as door:
        invitation = Invitation(tuple(own_addresses(interface)), door.getsockname()[1], secrets.token_hex(16))
        publish(invitation)
        yield Reception(door, invitation)


class Reception:
    def __init__(self, door: socket.socket, invitation: Invitation) -> None:
        self._door, self.invitation = door, invitation
        self._door.settimeout(POLL_SECONDS)

    def receive(self, num_nodes: int, attend: Attend) -> dict[int, tuple[Link, dict[str, Any]]]:
        """Every other node's link, and what it says of itself, by its number. Raises RunFailed when some stay away."""
        came: dict[int, tuple[Link, dict[str, Any]]] = {}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(came) < num_nodes - 1:
            attend()
            if time.monotonic() > deadline:
                missing = ", ".join(str(node) for node in range(1, num_nodes) if node not in came)
                for link, _ in came.values():
                    link.close()
                raise RunFailed(
                    f"node {missing} has not come to {' or '.join(self.invitation.addresses)} within "
                    f"{PATIENCE_SECONDS:.0f} s; see its log, and whether the network lets it through (interface)"
                )
            if guest := self._next_guest():
                link, facts = guest
                came[int(facts["node"])] = (link, facts)
        return came

    def _next_guest(self) -> tuple[Link, dict[str, Any]] | None:
        try:
            connection, _ = self._door.accept()
        except TimeoutError:
            return None
        link = Link(connection)
        try:
            words = link.receive(CONNECT_SECONDS)
        except Closed:
            words = None
        if isinstance(words, dict) and secrets.compare_digest(str(words.get("token")), self.invitation.token):
            return link, words["facts"]
        link.close()  # a stranger
        return None


def visit(invitation: Invitation, facts: dict[str, Any], attend: Attend) -> tuple[Link, str]:
    """On any other node: the link to the first one, and the address where it was found."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    trouble = ""
    while time.monotonic() < deadline:
        for address in invitation.addresses:
            attend()
            try:
                link = Link(socket.create_connection((address, invitation.port), CONNECT_SECONDS))
                link.send({"token": invitation.token, "facts": facts | {"address": address}})
            except (OSError, Closed) as error:
                trouble = f"{address}:{invitation.port}: {error}"
                continue
            return link, address
        time.sleep(POLL_SECONDS)
    raise RunFailed(
        f"{socket.gethostname()} does not reach the first node at {trouble}; name the interface in the site"
    )


def publish_file(path: Path) -> Callable[[Invitation], None]:
    """Leaves invitations on a disk that all nodes see."""

    def publish(invitation: Invitation) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(invitation.to_json()).encode(), mode=0o600)

    return publish


def await_file(path: Path, ended: Path, start: str, attend: Attend) -> Invitation:
    """The invitation, as soon as it is there; a RunFailed if the first node has left its last word on this start."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        attend()
        try:
            there = {entry.name for entry in path.parent.iterdir()}  # listing makes network disks look anew
            if ended.name in there and ended.read_text(encoding="utf-8").split("\n")[1] == start:
                raise RunFailed("the first node has ended already; its log says why")
            if path.name in there:
                return Invitation.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, LookupError):
            pass
        time.sleep(POLL_SECONDS)
    raise RunFailed(
        f"{socket.gethostname()} has waited {PATIENCE_SECONDS:.0f} s for {path}, which the first node writes; "
        "is the run directory on a disk that all nodes share?"
    )
