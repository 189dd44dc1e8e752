"""The nodes of a run, seen from each end of their links: the first node leads, the others do as it says.

    first → other   {"procs", "world"}, {"start": {"address", "port"}}, {"end": …}, {"over": …}, {"alive": …}
    other → first   {"ready": …} or {"unfit": why}, {"ended": Ending}, {"signal": "SIGTERM"}, {"alive": …}

An attempt is torchrun on every node at once. When ranks fail anywhere, the others notice by themselves and can say
why; only those that have not ended GRACE_SECONDS later are ended. A node that is silent, or whose link closes, is lost.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fortyfold.launch.attempt import PORT_TRIES, TERMINATE_SECONDS, Rendezvous, free_port
from fortyfold.launch.link import Closed, Link
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.failure import Ending, Failure
from fortyfold.spec.stop import StopFlag

ALIVE_SECONDS = 2.0
SILENT_SECONDS = 60.0
GRACE_SECONDS = 10.0
POLL_SECONDS = 0.1

Attend = Callable[[], None]
RunNode = Callable[[Rendezvous, Attend], Ending]
"""Runs this node's workers to their end."""


class NodeLost(RunFailed):
    """A node has gone; with the nodes that are left the run cannot go on."""


class Told(Exception):
    """The first node wants an end to what is being done here."""


@dataclass
class Node:
    """Another node, as the first one sees it."""

    number: int
    host: str
    ranks: range
    link: Link
    ready: bool = False
    """Whether it has its data."""
    unfit: str = ""
    """Why it cannot take part."""
    ending: Ending | None = None
    """How its workers of this attempt ended."""
    lost: str = ""
    """Why it is heard of no more."""
    _told_at: float = field(default_factory=time.monotonic)

    def tell(self, message: dict[str, Any]) -> None:
        try:
            self.link.send(message)
        except Closed as error:
            self.lost = self.lost or str(error)

    def listen(self, stop: StopFlag) -> None:
        """Take what it has said, and show that we live."""
        try:
            while not self.lost and (message := self.link.receive()) is not None:
                self.ready = self.ready or "ready" in message
                self.unfit = self.unfit or message.get("unfit", "")
                if "ended" in message:
                    self.ending = Ending.from_json(message["ended"])
                if "signal" in message:
                    stop.ask_by_name(message["signal"], message.get("reason"))
        except (Closed, KeyError, TypeError, ValueError, AttributeError) as error:
            self.lost = str(error) or "it talks nonsense"
        now = time.monotonic()
        if now - self.link.heard_at > SILENT_SECONDS:
            self.lost = self.lost or f"no sign of life for {SILENT_SECONDS:.0f} s"
        if now - self._told_at > ALIVE_SECONDS:
            self._told_at = now
            self.tell({"alive": True})

    def require(self) -> None:
        """Raises what keeps the run from beginning."""
        if self.unfit:
            raise UserError(f"node {self.number} ({self.host}): {self.unfit}")
        if self.lost:
            raise NodeLost(f"node {self.number} ({self.host}) was lost: {self.lost}")

    def result(self) -> Ending:
        if self.ending is not None:
            return self.ending
        how = f"was lost with its node {self.host} ({self.lost or 'it did not end'})"
        return Ending(tuple(Failure(rank, "gone", how, time=time.time()) for rank in self.ranks))


class Gang:
    """The first node's view of an attempt."""

    def __init__(
        self, address: str, others: list[Node], stop: StopFlag, run: RunNode, ports: tuple[int, int] | None = None
    ) -> None:
        self._address, self._others, self._stop, self._run, self._ports = address, others, stop, run, ports

    def attempt(self, attend: Attend) -> Ending:
        """torchrun on all nodes; how all ranks ended. Raises NodeLost when a node was lost before."""
        for _ in range(PORT_TRIES):
            ending = self._attempt(attend)
            if not ending.port_taken:
                break
        return ending

    def goodbye(self, what: str) -> None:
        """All is over."""
        for node in self._others:
            node.tell({"over": what})
            node.link.close()

    def _attempt(self, attend: Attend) -> Ending:
        self._listen()
        for node in self._others:
            node.require()
        port = free_port(self._ports)
        for node in self._others:
            node.ending = None
            node.tell({"start": {"address": self._address, "port": port}})
        watch = _Watch(self._others)

        def attend_all() -> None:
            attend()
            self._listen()
            if watch.is_late():
                raise Told

        try:
            own = self._run(Rendezvous(self._address, port, 0, len(self._others) + 1), attend_all)
        except Told:
            own = Ending()  # the others say what it was
        self._wait_for_others(attend, watch, own)
        return _merge([own, *(node.result() for node in self._others)])

    def _listen(self) -> None:
        for node in self._others:
            node.listen(self._stop)

    def _wait_for_others(self, attend: Attend, watch: "_Watch", own: Ending) -> None:
        told_at = None
        while waiting := [node for node in self._others if node.ending is None and not node.lost]:
            attend()
            self._listen()
            if told_at is None and watch.is_late(own):
                told_at = time.monotonic()
                for node in waiting:
                    node.tell({"end": True})
            if told_at is not None and time.monotonic() - told_at > 2 * TERMINATE_SECONDS:
                return
            time.sleep(POLL_SECONDS)


class _Watch:
    """Whether some have ended, and badly or for good, so long ago that the others should have, too."""

    def __init__(self, others: list[Node]) -> None:
        self._others, self._since = others, 0.0

    def is_late(self, own: Ending | None = None) -> bool:
        over = own is not None or any(node.lost or (node.ending not in (None, Ending())) for node in self._others)
        if not over:
            return False
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since > GRACE_SECONDS


def _merge(endings: list[Ending]) -> Ending:
    failures = tuple(failure for ending in endings for failure in ending.failures)
    troubles = [ending.trouble for ending in endings if ending.trouble]
    return Ending(failures, "; ".join(troubles), any(ending.port_taken for ending in endings))


def follow(leader: "Leader", node: int, num_nodes: int, run: RunNode) -> None:
    """Any other node's part: do as the first one says until it is over. Raises Closed."""
    while True:
        message = leader.next()
        if "over" in message:
            return
        if "start" in message:
            where = Rendezvous(message["start"]["address"], message["start"]["port"], node, num_nodes)
            leader.send({"ended": _run_until_told(run, where, leader).to_json()})


def _run_until_told(run: RunNode, where: Rendezvous, leader: "Leader") -> Ending:
    try:
        return run(where, leader.attend)
    except Told:
        return Ending(trouble=f"node {where.node} was ended by the first node")


class Leader:
    """The first node, as the others see it. It hears of signals here, and that we live. All methods raise Closed."""

    def __init__(self, link: Link, stop: StopFlag) -> None:
        self._link, self._stop = link, stop
        self._told_at, self._passed_on = 0.0, False

    def send(self, message: dict[str, Any]) -> None:
        self._link.send(message)

    def next(self, patience_seconds: float = SILENT_SECONDS) -> dict[str, Any]:
        """Its next order."""
        while True:
            self._show_life()
            message = self._link.receive(POLL_SECONDS)
            if message is not None and "alive" not in message:
                return dict(message)
            self._require_life(patience_seconds)

    def attend(self) -> None:
        """While something is done here: raises Told when the first node says anything."""
        self._show_life()
        message = self._link.receive()
        if message is not None and "alive" not in message:
            raise Told(message.get("over", ""))
        self._require_life(SILENT_SECONDS)

    def _show_life(self) -> None:
        if self._stop.signal is not None and not self._passed_on:
            self._passed_on = True
            self._link.send({"signal": self._stop.signal.name, "reason": self._stop.reason})
        if time.monotonic() - self._told_at > ALIVE_SECONDS:
            self._told_at = time.monotonic()
            self._link.send({"alive": True})

    def _require_life(self, patience_seconds: float) -> None:
        if time.monotonic() - self._link.heard_at > patience_seconds:
            raise Closed(f"no sign of life for {patience_seconds:.0f} s")
