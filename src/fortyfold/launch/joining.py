"""Any other node's part: it finds the first one, tells what it is, prepares itself, and does as it is told."""

import time

from fortyfold.launch.aws.store import keeping_records
from fortyfold.launch.facts import name_node
from fortyfold.launch.gang import SILENT_SECONDS, Leader, NodeLost, RunNode, Told, follow
from fortyfold.launch.link import Closed
from fortyfold.launch.meeting import PATIENCE_SECONDS, Meeting, note, visit
from fortyfold.launch.place import Place
from fortyfold.launch.plan import Plan
from fortyfold.launch.workers import prepare_workers, tell_facts
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.stop import StopFlag

MEET_SECONDS = 30.0


def join(plan: Plan, place: Place, meeting: Meeting, stop: StopFlag) -> int:
    """Until the first node says that it is over; gives the exit code."""
    asked_at: float | None = None

    def attend() -> None:
        """Whoever is asked to stop comes to the meeting nevertheless, so that the first node hears of it, and why."""
        nonlocal asked_at
        if stop.requested:
            asked_at = asked_at or time.monotonic()
            if time.monotonic() - asked_at > MEET_SECONDS:
                raise RunFailed(f"stopped ({stop.reason}) before the nodes met")

    facts = tell_facts(plan, place)
    link, address = visit(meeting.await_invitation(attend), facts, attend)
    leader = Leader(link, stop)
    try:
        run = _prepare(plan, address, leader)
        with keeping_records(plan, note):
            follow(leader, place.node, place.num_nodes, run)
    except Told as over:
        raise RunFailed(f"{name_node(facts)} is told that it is over: {over}") from None
    except Closed as error:
        raise NodeLost(f"{name_node(facts)} has lost the first node: {error}") from None
    finally:
        link.close()
    return 0  # how it ended is the first node's to say


def _prepare(plan: Plan, address: str, leader: Leader) -> RunNode:
    """Hear what this node's part is, and get ready for it."""
    order = leader.next(patience_seconds=PATIENCE_SECONDS + SILENT_SECONDS)  # others may be on their way still
    if "over" in order:
        raise Told(order["over"])
    try:
        run = prepare_workers(plan, address, order["procs"], order["world"], leader.attend)
    except UserError as error:
        leader.send({"unfit": str(error)})
        raise
    leader.send({"ready": True})
    return run
