"""Nodes that lead and follow, over real connections; in the place of torchrun there are functions."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from fortyfold.launch import gang, joining, meeting
from fortyfold.launch.attempt import Rendezvous
from fortyfold.launch.facts import lay_out
from fortyfold.launch.gang import Gang, Leader, Node, NodeLost, Told, follow
from fortyfold.launch.link import Closed, Link
from fortyfold.launch.meeting import Invitation, Meeting, invite, visit
from fortyfold.launch.place import Place
from fortyfold.launch.plan import Plan
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.failure import Ending, Failure
from fortyfold.spec.nodes import Gpus, NodeShape
from fortyfold.spec.stop import StopFlag

KILLED = Ending((Failure(1, "killed", "was killed by SIGKILL"),))
Work = Callable[[Callable[[], None]], Ending]


def at_once(ending: Ending) -> Work:
    return lambda attend: ending


def forever(attend: Callable[[], None]) -> Ending:
    while True:
        attend()
        time.sleep(0.01)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(gang, "TERMINATE_SECONDS", 1.0)


def linked() -> tuple[Link, Link]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        there = socket.create_connection(door.getsockname())
        here, _ = door.accept()
    return Link(here), Link(there)


@pytest.fixture
def pair() -> Iterator[tuple[Node, Leader]]:
    """Another node as the first one sees it, and the first one as the other sees it."""
    here, there = linked()
    yield Node(1, "gpu17", range(2, 4), here), Leader(there, StopFlag())
    here.close()
    there.close()


class Nodes:
    """A first node and another, connected."""

    def __init__(self, first: Work, other: Work) -> None:
        here, self.link = linked()
        self.stop, self.others_stop = StopFlag(), StopFlag()
        self.places: list[Rendezvous] = []
        node = Node(1, "gpu17", range(2, 4), here)
        self.gang = Gang("127.0.0.1", [node], self.stop, lambda where, attend: first(attend))
        self._other = other
        self._errors: list[Exception] = []
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        def run(where: Rendezvous, attend: Callable[[], None]) -> Ending:
            self.places.append(where)
            return self._other(attend)

        try:
            follow(Leader(self.link, self.others_stop), 1, 2, run)
        except Exception as error:
            self._errors.append(error)

    def attempt(self) -> Ending:
        return self.gang.attempt(lambda: None)

    def over(self) -> list[Exception]:
        self.gang.goodbye("trained")
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.link.close()
        return self._errors


def test_both_end_well_and_start_again(hurried: None) -> None:
    nodes = Nodes(at_once(Ending()), at_once(Ending()))
    assert nodes.attempt() == nodes.attempt() == Ending()
    assert [(place.node, place.num_nodes, place.address) for place in nodes.places] == [(1, 2, "127.0.0.1")] * 2
    assert nodes.over() == []


def test_failures_of_all_nodes_are_one_attempts(hurried: None) -> None:
    lost = Ending((Failure(0, "consequence", "closed"),))
    nodes = Nodes(at_once(lost), at_once(KILLED))
    assert nodes.attempt().failures == (*lost.failures, *KILLED.failures)
    assert nodes.over() == []


def test_who_does_not_notice_is_ended(hurried: None) -> None:
    there = Nodes(at_once(KILLED), forever)
    assert there.attempt().failures == KILLED.failures
    assert there.over() == []
    here = Nodes(forever, at_once(KILLED))
    assert here.attempt().failures == KILLED.failures
    assert here.over() == []


def test_a_signal_there_is_heard_here(hurried: None) -> None:
    def until_asked(attend: Callable[[], None]) -> Ending:
        while not nodes.stop.requested:
            attend()
            time.sleep(0.01)
        return Ending()

    def for_a_while(attend: Callable[[], None]) -> Ending:
        nodes.others_stop.ask_by_name("SIGUSR1", "spot notice")
        for _ in range(20):
            attend()
            time.sleep(0.01)
        return Ending()

    nodes = Nodes(until_asked, for_a_while)
    assert nodes.attempt() == Ending()
    assert nodes.stop.reason == "spot notice"
    assert nodes.over() == []


def test_a_node_that_goes_is_named_and_the_run_cannot_go_on(hurried: None) -> None:
    def go(attend: Callable[[], None]) -> Ending:
        nodes.link.close()
        raise Closed("gone")

    nodes = Nodes(forever, go)
    told = [failure.message for failure in nodes.attempt().failures]
    assert len(told) == 2 and told[0].startswith("was lost with its node gpu17 (")
    with pytest.raises(NodeLost, match=r"node 1 \(gpu17\) was lost"):
        nodes.attempt()
    nodes.over()


def test_a_first_node_that_goes_ends_the_others(hurried: None) -> None:
    nodes = Nodes(at_once(Ending()), forever)
    nodes.gang._others[0].link.close()
    assert [type(error) for error in nodes.over()] == [Closed]


def test_strangers_are_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "PATIENCE_SECONDS", 3.0)
    invitations: list[Invitation] = []
    with invite("lo", None, invitations.append) as reception:
        (invitation,) = invitations
        wrong = Invitation(invitation.addresses, invitation.port, "guess")
        links = [visit(wrong, {"node": 1}, lambda: None)[0]]
        links.append(visit(invitation, {"node": 2, "host": "x"}, lambda: None)[0])
        with pytest.raises(RunFailed, match=r"node 1 has not come to 127\.0\.0\.1 within 3 s"):
            reception.receive(3, lambda: None)
        links.append(visit(invitation, {"node": 1, "host": "y"}, lambda: None)[0])
        links.append(visit(invitation, {"node": 2, "host": "x"}, lambda: None)[0])
        came = reception.receive(3, lambda: None)
        assert [facts["host"] for _, facts in came.values()] == ["y", "x"]
    for link in [*links, *(link for link, _ in came.values())]:
        link.close()


def test_nodes_show_life_while_they_prepare(pair: tuple[Node, Leader], monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging may take longer than the longest silence."""
    monkeypatch.setattr(gang, "SILENT_SECONDS", 0.6)
    monkeypatch.setattr(gang, "ALIVE_SECONDS", 0.1)

    def stage(plan: Plan, address: str, procs: int, world: int, attend: Callable[[], None]) -> str:
        assert (procs, world) == (2, 4)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            attend()
            time.sleep(0.05)
        return "run"

    monkeypatch.setattr(joining, "prepare_workers", stage)
    (node, leader), stop, came = pair, StopFlag(), list[object]()
    thread = threading.Thread(target=lambda: came.append(joining._prepare(cast(Plan, None), "a", leader)), daemon=True)
    thread.start()
    node.tell({"procs": 2, "world": 4})
    until = time.monotonic() + 10
    while not node.ready and time.monotonic() < until:
        node.listen(stop)
        node.require()
        time.sleep(0.05)
    thread.join(10)
    assert node.ready and came == ["run"]
    node.tell({"over": "stopped"})
    with pytest.raises(Told, match="stopped"):
        while True:
            leader.attend()


def test_a_node_that_is_unfit_is_named(pair: tuple[Node, Leader], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise UserError("no data folder x")

    monkeypatch.setattr(joining, "prepare_workers", refuse)
    node, leader = pair
    node.tell({"procs": 2, "world": 4})
    with pytest.raises(UserError, match=r"^no data folder x"):
        joining._prepare(cast(Plan, None), "a", leader)
    node.listen(StopFlag())
    with pytest.raises(UserError, match=r"^node 1 \(gpu17\): no data folder x"):
        node.require()


def test_who_is_asked_to_stop_comes_to_the_meeting_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell_nothing(invitation: Invitation, told: object, attend: Callable[[], None]) -> tuple[Link, str]:
        attend()
        raise Closed("met")

    def never(attend: Callable[[], None]) -> Invitation:
        while True:
            attend()

    stop, place = StopFlag(), Place(1, 2, None)
    stop.ask_by_name("SIGUSR1", "spot notice")
    monkeypatch.setattr(joining, "visit", tell_nothing)
    monkeypatch.setattr(joining, "tell_facts", lambda plan, place: {})
    there = Meeting(lambda invitation: None, lambda attend: Invitation(("127.0.0.1",), 1, ""), lambda word: None)
    with pytest.raises(Closed, match="met"):
        joining.join(cast(Plan, None), place, there, stop)
    monkeypatch.setattr(joining, "MEET_SECONDS", 0.1)
    with pytest.raises(RunFailed, match=r"stopped \(spot notice\) before the nodes met"):
        joining.join(cast(Plan, None), place, Meeting(there.publish, never, there.note_end), stop)


def facts(node: int, gpus: int | None, version: str = "1", decoder: str = "native") -> dict[str, object]:
    return {"node": node, "host": f"h{node}", "gpus": gpus, "versions": {"torch": version}, "decoder": decoder}


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ([facts(0, 2), facts(1, 2, "2")], r"node 1 \(h1\) has torch 2, and node 0 \(h0\) 1"),
        ([facts(0, 2), facts(1, 2, decoder="pillow")], r"node 1 \(h1\) decodes by pillow"),
        ([facts(0, 2), facts(1, 1)], r"node 1 \(h1\) has 1 GPUs, and 2 were asked for"),
        ([facts(0, 2)], "1 nodes came, and 2 were asked for"),
    ],
)
def test_nodes_that_are_not_as_planned(nodes: list[dict[str, object]], told: str) -> None:
    with pytest.raises(UserError, match=told):
        lay_out([NodeShape(2, Gpus(2))] * 2, nodes)


def test_unequal_nodes_come_in_any_order() -> None:
    planned = [NodeShape(2, Gpus(2)), NodeShape(1, Gpus(1))]
    assert lay_out(planned, [facts(0, 1), facts(1, 2)]) == [1, 2]
    with pytest.raises(UserError, match="2 GPUs were found"):
        lay_out(planned, [facts(0, 1), facts(1, 1)])
