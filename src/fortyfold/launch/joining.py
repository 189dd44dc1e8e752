"""Any other node's part: it finds the first one, tells what it is, prepares itself, and does as it is told."""

import time

from fortyfold.launch.facts import name_node
from fortyfold.launch.gang import NodeLost, follow
from fortyfold.launch.link import Closed
from fortyfold.launch.meeting import Meeting, visit
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
    try:
        while (message := link.receive(1.0)) is None or "alive" in message:
            pass
        if "over" in message:
            raise RunFailed(f"{name_node(facts)} is told that it is over: {message['over']}")
        try:
            run = prepare_workers(plan, address, message["procs"], message["world"], lambda: None)
        except UserError as error:
            link.send({"unfit": str(error)})
            raise
        link.send({"ready": True})
        follow(link, place.node, place.num_nodes, stop, run)
    except Closed as error:
        raise NodeLost(f"{name_node(facts)} has lost the first node: {error}") from None
    finally:
        link.close()
    return 0  # how it ended is the first node's to say
