"""The first node's part: it meets the others, has all prepare themselves, and decides what is done until the end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

from fortyfold.launch.attach import attached
from fortyfold.launch.aws.store import Tell, keeping
from fortyfold.launch.check import add_problems, describe_ending, require_no_problems
from fortyfold.launch.facts import Facts, lay_out, name_node
from fortyfold.launch.gang import POLL_SECONDS, Gang, Node, NodeLost
from fortyfold.launch.link import Closed, Link
from fortyfold.launch.meeting import Invitation, Meeting, Reception, invite
from fortyfold.launch.place import Place
from fortyfold.launch.plan import Plan
from fortyfold.launch.prepare import prepare_data
from fortyfold.launch.requeue import note_end
from fortyfold.launch.supervise import supervise, taking_over
from fortyfold.launch.workers import prepare_workers, tell_facts
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.events import read_events
from fortyfold.spec.exit_codes import STOPPED, TRAINED
from fortyfold.spec.parent import parent_variable
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag, hearing_requests, read_request


class _Stop(Exception):
    """Asked to stop before training began."""


def lead(plan: Plan, place: Place, meeting: Meeting, stop: StopFlag) -> int:
    """The first node's part. Sinks have their time to finish when the run, and the other nodes, are let go."""
    with attached(RunDir(plan.run), plan.job["recipe"]["log"]["sinks"], stop):
        return _lead(plan, place, meeting, stop)


def _lead(plan: Plan, place: Place, meeting: Meeting, stop: StopFlag) -> int:
    """Whatever happens is the last word in `ended`."""
    run_dir, word = RunDir(plan.run), "failed"
    try:
        interface = plan.site.interface if place.num_nodes > 1 else "lo"
        door = invite(interface, plan.site.ports, meeting.publish)
        taken = taking_over(run_dir, keep_cancelled=bool(meeting.start))
        kept = nullcontext() if plan.checks else keeping(plan, stop, meeting.tell)
        with taken, hearing_requests(run_dir, stop), door as reception, kept:
            gang = _gather(plan, place, reception, stop, meeting.tell)
            try:
                word = _train(plan, gang, stop)
            finally:
                gang.goodbye(word)  # before all that is left to do here
        return TRAINED if word in ("trained", "checked") else STOPPED
    except _Stop:
        word = stop.reason
        return STOPPED
    except NodeLost:
        word = "lost"
        raise
    finally:
        meeting.note_end(note_end(run_dir, word, meeting.start))


def _train(plan: Plan, gang: Gang, stop: StopFlag) -> str:
    """Attempt after attempt, or one that only checks; gives the last word."""
    if plan.checks:
        add_problems(plan, describe_ending(gang.attempt(lambda: None)))
        return "checked"
    print(f"training {plan.name} in {plan.run}", file=sys.stderr, flush=True)
    run_dir = RunDir(plan.run)
    with _shown(run_dir):
        ended = supervise(run_dir, gang.attempt, stop, partial(print, file=sys.stderr, flush=True))
    return _last_word(run_dir, stop, ended.unsaved)


def _last_word(run_dir: RunDir, stop: StopFlag, unsaved: str) -> str:
    events = read_events(run_dir.events())
    if events and events[-1]["kind"] == "finished":
        return "trained"
    if read_request(run_dir) == signal.SIGINT:  # whatever else came to pass, somebody wants it to stay stopped
        return "cancelled"
    if events and events[-1]["kind"] == "stopped" and not unsaved:
        return str(events[-1]["reason"])
    return stop.reason if stop.requested else "failed"


def _gather(plan: Plan, place: Place, reception: Reception, stop: StopFlag, tell: Tell) -> Gang:
    """Meet the others, see that all is as planned, and have every node prepare itself."""
    others: list[Node] = []

    def attend() -> None:
        for node in others:
            node.listen(stop)
        if stop.requested:
            raise _Stop
        for node in others:
            node.require()

    came = reception.receive(place.num_nodes, attend)
    facts = [tell_facts(plan, place), *(came[node][1] for node in sorted(came))]
    try:
        if plan.checks:
            require_no_problems(plan, facts)
        procs = lay_out(plan.shapes, facts, in_order=plan.site.kind != "slurm")
        _tell_of_idle_gpus(facts, procs, tell)
        address = _agreed_address(reception.invitation, facts[1:])
        others += _name_others(facts, procs, [came[node][0] for node in sorted(came)])
        if not plan.apart and not plan.checks:
            prepare_data(plan, attend)
        for node in others:
            node.tell({"procs": len(node.ranks), "world": sum(procs)})
        run = prepare_workers(plan, address, procs[0], sum(procs), attend)
        while not all(node.ready for node in others):
            attend()
            time.sleep(POLL_SECONDS)
    except (UserError, RunFailed, _Stop) as error:
        for link, _ in came.values():
            with suppress(Closed):
                link.send({"over": str(error) or "stopped"})
            link.close()
        raise
    return Gang(address, others, stop, run, plan.site.ports)


def _tell_of_idle_gpus(facts: Sequence[Facts], procs: Sequence[int], tell: Tell) -> None:
    for node, count in zip(facts, procs, strict=True):
        if (node["gpus"] or 0) > count:
            used = f"and {count} of them will be used; see gpus in the site"
            tell({"note": f"{name_node(node)} has {node['gpus']} GPUs, {used}"})


def _agreed_address(invitation: Invitation, others: Sequence[Facts]) -> str:
    """Where the others have found this node."""
    return str(others[0]["address"]) if others else invitation.addresses[0]


def _name_others(facts: Sequence[Facts], procs: Sequence[int], links: Sequence[Link]) -> list[Node]:
    """Each of the others, with the ranks that are its own."""
    nodes = []
    for number, link in enumerate(links, start=1):
        first = sum(procs[:number])
        nodes.append(Node(number, facts[number]["host"], range(first, first + procs[number]), link))
    return nodes


@contextmanager
def _shown(run_dir: RunDir) -> Iterator[None]:
    """A line now and then in the job's log, by `fortyfold watch` in a process of its own."""
    command = [sys.executable, "-m", "fortyfold", "watch", "--here", str(run_dir.path)]
    environment = os.environ | parent_variable()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment)
    try:
        yield
    finally:
        process.terminate()
        process.wait()
