"""`python -m fortyfold.launch.node`: what runs on each node of a run, whatever brought it there.

It learns its place from the scheduler, meets the others (meeting.py), compares what they are with the plan, brings
the data to the node, and runs torchrun until the run ends. The first node decides: when ranks are lost all start again,
and its last word, in the file `ended` of the run directory, says whether the job is to be queued again.

Exit codes are those of `fortyfold train`: 0 trained, 75 stopped unfinished, 2 bad input, 1 failure.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fortyfold.launch.attach import attached
from fortyfold.launch.attempt import Rendezvous, run_node
from fortyfold.launch.environment import worker_environment
from fortyfold.launch.facts import Facts, lay_out, name_node, own_facts
from fortyfold.launch.gang import Attend, Gang, Node, NodeLost, RunNode, follow
from fortyfold.launch.link import Closed, Link
from fortyfold.launch.local import WORKER
from fortyfold.launch.meeting import Invitation, Reception, await_file, invite, publish_file, visit
from fortyfold.launch.network import interface_towards
from fortyfold.launch.place import Place, find_place
from fortyfold.launch.plan import Plan, read_plan
from fortyfold.launch.prepare import prepare_data, stage_here
from fortyfold.launch.requeue import note_end
from fortyfold.launch.spot import watch_for_notice
from fortyfold.launch.supervise import supervise, taking_over
from fortyfold.launch.wire import Wire
from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.events import read_events
from fortyfold.spec.failure import Ending
from fortyfold.spec.run_dir import RunDir, write_json
from fortyfold.spec.stop import StopFlag, hearing_requests

TRAINED, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 75


class _Stop(Exception):
    """Asked to stop before training began."""


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    stop = StopFlag().listen()
    try:
        plan, meeting = _open(options, stop)
        _note_deadline(stop)
        if isinstance(plan.site, AwsSite) and plan.site.spot:
            watch_for_notice(stop)
        place = find_place(plan.site.kind)
        if place.node == 0:
            return _lead(plan, place, meeting, stop)
        return _follow(plan, place, meeting, stop)
    except UserError as error:
        return _complain(error, BAD_INPUT)
    except RunFailed as error:
        return _complain(error, FAILED)


@dataclass(frozen=True)
class _Meeting:
    """How the nodes are brought together: by a file on the disk that they share, or by the ssh launcher."""

    publish: Callable[[Invitation], None]
    await_invitation: Callable[[Attend], Invitation]
    note_end: Callable[[str], None]


def _open(options: argparse.Namespace, stop: StopFlag) -> tuple[Plan, _Meeting]:
    if options.plan is None:
        wire = Wire(stop)
        os.environ.update(wire.await_word("secrets"))
        plan = Plan.from_json(wire.await_word("plan"))
        RunDir(plan.run).launch.mkdir(parents=True, exist_ok=True)
        write_json(RunDir(plan.run).plan, plan.to_json())
        return plan, _Meeting(wire.publish, wire.await_invitation, wire.note_end)
    plan = read_plan(options.plan)
    path = RunDir(plan.run).invitation(options.start)

    def note_end(word: str) -> None:
        path.unlink(missing_ok=True)

    return plan, _Meeting(publish_file(path), partial(await_file, path), note_end)


def _complain(error: Exception, code: int) -> int:
    print(f"fortyfold: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return code


def _note_deadline(stop: StopFlag) -> None:
    """Where no scheduler warns of the end of the time, a timer does. job.sh says when the time is over."""
    if end := os.environ.get("FORTYFOLD_DEADLINE"):
        timer = threading.Timer(max(0.0, float(end) - time.time()), stop.ask_by_name, ["SIGUSR1"])
        timer.daemon = True
        timer.start()


def _lead(plan: Plan, place: Place, meeting: _Meeting, stop: StopFlag) -> int:
    """The first node's part. Whatever happens is the last word in `ended`."""
    run_dir, gang = RunDir(plan.run), None
    word = "failed"
    try:
        interface = plan.site.interface if place.num_nodes > 1 else "lo"
        with taking_over(run_dir), hearing_requests(run_dir, stop), invite(interface, meeting.publish) as reception:
            gang = _gather(plan, place, reception, stop)
            print(f"training {plan.name} in {plan.run}", file=sys.stderr, flush=True)
            with attached(run_dir, plan.job["recipe"]["log"]["sinks"], stop), _shown(run_dir):
                ended = supervise(run_dir, gang.attempt, stop, partial(print, file=sys.stderr, flush=True))
        word = _last_word(run_dir, stop, ended.unsaved)
        return TRAINED if word == "trained" else STOPPED
    except _Stop:
        word = stop.reason
        return STOPPED
    except NodeLost:
        word = "lost"
        raise
    finally:
        meeting.note_end(note_end(run_dir, word))
        if gang is not None:
            gang.goodbye(word)


def _last_word(run_dir: RunDir, stop: StopFlag, unsaved: str) -> str:
    events = read_events(run_dir.events())
    if events and events[-1]["kind"] == "finished":
        return "trained"
    if events and events[-1]["kind"] == "stopped" and not unsaved:
        return str(events[-1]["reason"])
    return stop.reason if stop.requested else "failed"


def _gather(plan: Plan, place: Place, reception: Reception, stop: StopFlag) -> Gang:
    """Meet the others, see that all is as planned, and have every node prepare itself."""

    def attend() -> None:
        if stop.requested:
            raise _Stop

    came = reception.receive(place.num_nodes, attend)
    facts = [own_facts(place), *(came[node][1] for node in sorted(came))]
    try:
        procs = lay_out(plan.shapes, facts)
        address = _agreed_address(reception.invitation, facts[1:])
        if not plan.apart:
            prepare_data(plan, attend)
        others = _introduce(facts, procs, [came[node][0] for node in sorted(came)])
        run = _worker_runner(plan, address, procs[0], sum(procs), attend)
        _await_ready(others, attend)
    except (UserError, RunFailed, _Stop) as error:
        for link, _ in came.values():
            link.send({"over": str(error) or "stopped"})
        raise
    return Gang(address, others, stop, run)


def _agreed_address(invitation: Invitation, others: Sequence[Facts]) -> str:
    """Where the others have found this node."""
    return str(others[0]["address"]) if others else invitation.addresses[0]


def _introduce(facts: Sequence[Facts], procs: Sequence[int], links: Sequence[Link]) -> list[Node]:
    """Tell each of the others how many ranks it runs."""
    nodes = []
    for number, link in enumerate(links, start=1):
        first = sum(procs[:number])
        link.send({"procs": procs[number], "world": sum(procs)})
        nodes.append(Node(number, facts[number]["host"], range(first, first + procs[number]), link))
    return nodes


def _await_ready(others: Sequence[Node], attend: Attend) -> None:
    """Until each has its data."""
    for node in others:
        while True:
            attend()
            try:
                message = node.link.receive(0.1)
            except Closed as error:
                raise NodeLost(f"node {node.number} ({node.host}) was lost while it prepared: {error}") from None
            if message and "unfit" in message:
                raise UserError(f"node {node.number} ({node.host}): {message['unfit']}")
            if message and "ready" in message:
                break


def _worker_runner(plan: Plan, address: str, procs: int, world: int, attend: Attend) -> RunNode:
    """Prepares this node; gives how to run its workers."""
    if plan.apart:
        prepare_data(plan, attend)
    staged = stage_here(plan, attend)
    interface = interface_towards(address, plan.site.interface) if len(plan.shapes) > 1 else None
    here = {"run": str(plan.run), "staged": staged.to_json() if staged else None}
    job = plan.job | here | {"world": world, "apart": plan.apart}
    environment = worker_environment(job, procs, interface, preset_threads=plan.site.kind == "pbs")

    def run(where: Rendezvous, attend: Attend) -> Ending:
        return run_node(WORKER, procs, environment, where, attend)

    return run


def _follow(plan: Plan, place: Place, meeting: _Meeting, stop: StopFlag) -> int:
    """Any other node's part."""

    def attend() -> None:
        if stop.requested:
            raise RunFailed(f"stopped ({stop.reason}) before the nodes met")

    facts = own_facts(place)
    link, address = visit(meeting.await_invitation(attend), facts, attend)
    try:
        while (message := link.receive(1.0)) is None or "alive" in message:
            pass
        if "over" in message:
            raise RunFailed(f"{name_node(facts)} is told that it is over: {message['over']}")
        try:
            run = _worker_runner(plan, address, message["procs"], message["world"], lambda: None)
        except UserError as error:
            link.send({"unfit": str(error)})
            raise
        link.send({"ready": True})
        follow(link, place.node, place.num_nodes, stop, run)
    except Closed as error:
        raise NodeLost(f"{name_node(facts)} has lost the first node: {error}") from None
    return 0  # how it ended is the first node's to say


@contextmanager
def _shown(run_dir: RunDir) -> Iterator[None]:
    """A line now and then in the job's log, by `fortyfold watch` in a process of its own."""
    command = [sys.executable, "-m", "fortyfold", "watch", str(run_dir.path)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fortyfold.launch.node")
    parser.add_argument("--plan", type=Path, help="plan.json of the run; without it, a launcher speaks on stdin")
    parser.add_argument("--start", default="", help="names this start of the job: the nodes meet under it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
