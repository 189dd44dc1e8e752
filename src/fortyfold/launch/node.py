"""`python -m fortyfold.launch.node`: what runs on each node of a run, whatever brought it there.

It learns its place from the scheduler, meets the others (meeting.py), compares what they are with the plan, brings
the data to the node, and runs torchrun until the run ends. The first node decides: when ranks are lost all start again,
and its last word, in the file `ended` of the run directory, says whether the job is to be queued again.

Exit codes are those of `fortyfold train`: 0 trained, 75 stopped unfinished, 2 bad input, 1 failure.
"""

import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fortyfold.launch.joining import join
from fortyfold.launch.leading import lead
from fortyfold.launch.meeting import Meeting, await_file, publish_file
from fortyfold.launch.place import find_place
from fortyfold.launch.plan import Plan, read_plan
from fortyfold.launch.spot import watch_for_notice
from fortyfold.launch.wire import KEEPING_SECONDS, Wire
from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.exit_codes import BAD_INPUT, FAILED
from fortyfold.spec.run_dir import RunDir, write_json
from fortyfold.spec.stop import StopFlag


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
            return lead(plan, place, meeting, stop)
        return join(plan, place, meeting, stop)
    except UserError as error:
        return _complain(error, BAD_INPUT)
    except RunFailed as error:
        return _complain(error, FAILED)


def _open(options: argparse.Namespace, stop: StopFlag) -> tuple[Plan, Meeting]:
    if options.plan is None:
        wire = Wire(stop)
        os.environ.update(wire.await_word("secrets"))
        plan = Plan.from_json(wire.await_word("plan"))
        plan = replace(plan, run=plan.run.expanduser())
        if plan.store:
            wire.orphan_seconds = KEEPING_SECONDS
        RunDir(plan.run).launch.mkdir(parents=True, exist_ok=True)
        write_json(RunDir(plan.run).plan, plan.to_json())
        return plan, Meeting(wire.publish, wire.await_invitation, wire.note_end, tell=wire.tell)
    plan = read_plan(options.plan)
    run_dir = RunDir(plan.run)
    path = run_dir.invitation(options.start)

    def note_end(word: str) -> None:
        path.unlink(missing_ok=True)

    await_invitation = partial(await_file, path, run_dir.ended, options.start)
    return plan, Meeting(publish_file(path), await_invitation, note_end, options.start)


def _complain(error: Exception, code: int) -> int:
    print(f"fortyfold: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return code


def _note_deadline(stop: StopFlag) -> None:
    """Where no scheduler warns of the end of the time, a timer does. job.sh says when the time is over."""
    if end := os.environ.get("FORTYFOLD_DEADLINE"):
        timer = threading.Timer(max(0.0, float(end) - time.time()), stop.ask_by_name, ["SIGUSR1"])
        timer.daemon = True
        timer.start()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fortyfold.launch.node")
    parser.add_argument("--plan", type=Path, help="plan.json of the run; without it, a launcher speaks on stdin")
    parser.add_argument("--start", default="", help="names this start of the job: the nodes meet under it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
