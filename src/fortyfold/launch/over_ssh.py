"""Agents on hosts by ssh: what the launchers that reach their hosts so have in common, wherever the hosts are from.

This command starts an agent on each host and looks after them. When it ends, for whatever reason, so do the agents
(launch/wire.py). Where hosts share no disk, the run lives on the first one, and all it says comes here while it runs:
each checkpoint as soon as it is whole, unless runs are kept where they outlive the hosts.
"""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fortyfold.launch import remote
from fortyfold.launch.bootstrap import installed_python
from fortyfold.launch.contract import Job, Rendered, Say
from fortyfold.launch.foreground import ask_to_stop
from fortyfold.launch.mirroring import fetch, mirrored
from fortyfold.launch.plan import Plan
from fortyfold.launch.requeue import AGAIN, MOST_IDLE
from fortyfold.launch.wire import ALIVE_SECONDS
from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.beside import beside
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.events import read_events
from fortyfold.spec.exit_codes import STOPPED
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.site import RemoteSite
from fortyfold.spec.stop import StopFlag, hearing_requests

POLL_SECONDS = 0.2
END_SECONDS = 20.0  # for agents to end after one of them has
FINISH_SECONDS = END_SECONDS + 60.0  # for the first one when the run has ended: its sinks may have to catch up
PAUSE_SECONDS = 5.0  # before another start
FETCH_SECONDS = 300.0  # for a connection that fails at the end to be there again
AGAIN_SECONDS = 30.0  # the same of hosts that are about to go
LIFE_SECONDS = 30.0  # between two signs of life in job.json; without one for four times as long, nobody is there


def bootstrapped(plan: Plan) -> Plan:
    """With the interpreter that the hosts will have."""
    return replace(plan, python=installed_python(site)) if (site := _site(plan)).bootstrap == "wheel" else plan


def _site(plan: Plan) -> RemoteSite:
    assert isinstance(plan.site, RemoteSite)
    return plan.site


@contextmanager
def looking_after(plan: Plan, hosts: Sequence[str], run_dir: RunDir) -> Iterator[None]:
    """Inside, this process looks after the run, and job.json says so; old logs go."""
    name, log = f"{os.getpid()}@{socket.gethostname()}", str(_log(run_dir, 0))
    job = Job(plan.site.kind, name, plan.site_name, log, time.time(), [*hosts], alive=time.time())
    job.write(run_dir)
    for node in range(len(hosts)):
        _log(run_dir, node).unlink(missing_ok=True)

    def show_life(over: threading.Event) -> None:
        while not over.wait(LIFE_SECONDS):
            with suppress(OSError):
                replace(job, alive=time.time()).write(run_dir)

    try:
        with beside("job", show_life):
            yield
    finally:
        with suppress(OSError):
            replace(job, alive=0.0).write(run_dir)


def start_until_over(start: Callable[[], tuple[str, int]], run_dir: RunDir, stop: StopFlag, say: Say) -> int:
    """Start again what ended with a reason to go on; starts that save nothing new are bounded. Gives the exit code."""
    idle, furthest = 0, _saved_steps(run_dir)
    while True:
        word, code = start()
        if word not in AGAIN or stop.requested:
            return STOPPED if word == "lost" else code
        saved = _saved_steps(run_dir)
        idle, furthest = (0, saved) if saved > furthest else (idle + 1, furthest)
        if idle >= MOST_IDLE:
            raise RunFailed(f"{idle} starts in a row have saved nothing new; see the logs in {run_dir.logs}")
        what = "hosts were lost" if word == "lost" else word
        say(f"note: {what}; starting again from the last checkpoint")
        time.sleep(PAUSE_SECONDS)


def _saved_steps(run_dir: RunDir) -> int:
    """The most that was saved, here or where only the hosts see it; -1: nothing."""
    told = [int(event["step"]) for event in read_events(run_dir.events()) if event["kind"] == "saved"]
    return max([*told, -1 if (here := run_dir.saved_steps()) is None else here])


def _log(run_dir: RunDir, node: int) -> Path:
    return run_dir.logs / f"job-node-{node}.log"


@dataclass
class _Agent:
    """One host's, as this command sees it."""

    host: str
    process: remote.Process
    say: Say
    words: dict[str, Any] = field(default_factory=dict)
    """What it has said."""

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):
                told = json.loads(line)
                if not isinstance(told, dict):  # a greeting
                    continue
                self.words |= told
                if "note" in told:
                    self.say(f"note: {told['note']}")


def start_once(
    plan: Plan, rendered: Rendered, hosts: Sequence[str], run_dir: RunDir, stop: StopFlag, say: Say
) -> tuple[str, int]:
    """An agent on each host, until all have ended; gives the run's last word, `lost` without one, and the exit code."""
    # A request in the run directory is heard by the agents; where that is a copy, here.
    hearing = hearing_requests(run_dir, stop) if plan.apart else nullcontext()
    with hearing, _agents(plan, rendered, hosts, run_dir, say) as agents, mirrored(plan, hosts, run_dir, say):
        _attend(agents, stop)
    words = agents[0].words
    word = str(words.get("ended", "lost"))
    for agent in agents:
        if agent.process.returncode == remote.UNREACHABLE:
            say(f"note: the connection to {agent.host} ended")
    if plan.apart:
        goes_on = "ended" in words and word in AGAIN and not stop.requested
        _fetch_last(plan, hosts, run_dir, words, say, goes_on=goes_on)
    if "ended" not in words:
        _require_hope(agents, run_dir, reached="invitation" in words, stays=not plan.checks)
    return word, agents[0].process.returncode


def _fetch_last(
    plan: Plan, hosts: Sequence[str], run_dir: RunDir, words: dict[str, Any], say: Say, *, goes_on: bool
) -> None:
    """What the hosts have at the end, with `words` said. RunFailed if that is neither to be had nor kept elsewhere."""
    kept = not isinstance(plan.site, AwsSite) or (plan.site.keeps_runs and "unkept" not in words)
    begins_there = goes_on and kept and plan.site.keeps_runs
    patience = AGAIN_SECONDS if goes_on else FETCH_SECONDS if "ended" in words else 0.0
    why = _fetch_patiently(plan, hosts, run_dir, patience, checkpoints=not begins_there)
    if why and not kept and "ended" in words and not goes_on:
        raise RunFailed(f"the end of the run is lost: it could not be fetched ({why})")
    if why:
        where = f"it is in {plan.site.run_root or plan.run}" if kept else "what is here holds"
        say(f"note: not all of the run could be fetched ({why}); {where}")


def _fetch_patiently(
    plan: Plan, hosts: Sequence[str], run_dir: RunDir, patience_seconds: float, *, checkpoints: bool
) -> str:
    """Gives why it was not possible within that time, if it was not."""
    until = time.monotonic() + patience_seconds
    while True:
        try:
            fetch(plan, hosts, run_dir, checkpoints=checkpoints)
            return ""
        except (UserError, RunFailed, ValueError, OSError) as error:
            if time.monotonic() > until:
                return str(error)
        time.sleep(PAUSE_SECONDS)


def _require_hope(agents: list[_Agent], run_dir: RunDir, *, reached: bool, stays: bool) -> None:
    """An agent that ended without a last word, over a connection that held or was never made, would do so again.

    When the first host is gone, the others say that they have lost it; that is no reason of their own.
    """
    first = agents[0].process.returncode
    if first < 0 or (first == remote.UNREACHABLE and reached):
        return
    for node, agent in enumerate(agents):
        code = agent.process.returncode
        if code > 0 and (code != remote.UNREACHABLE or not reached):
            said = remote.complaint(code, _log(run_dir, node).read_bytes())
            raise UserError(f"host {agent.host}: {said}" + (f"; more is in {_log(run_dir, node)}" if stays else ""))


@contextmanager
def _agents(plan: Plan, rendered: Rendered, hosts: Sequence[str], run_dir: RunDir, say: Say) -> Iterator[list[_Agent]]:
    secrets = {name: os.environ[name] for name in plan.site.secrets if name in os.environ}
    script = next(iter(rendered.files.values()))
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        agents = []
        for node, host in enumerate(hosts):
            log = stack.enter_context(_log(run_dir, node).open("ab"))
            process = remote.start(_site(plan), host, script, (0, node, len(hosts)), log)
            stack.callback(_end, process)
            remote.write(process, _line({"secrets": secrets, "plan": plan.to_json()}))
            agents.append(_Agent(host, process, say))
        listening = threading.Thread(target=agents[0].listen, name="ssh", daemon=True)
        listening.start()
        yield agents
        listening.join(END_SECONDS)


def _end(process: remote.Process) -> None:
    """Its stdin closes, and the agent ends; of a host that is gone only this end of the line is there to be ended."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _attend(agents: list[_Agent], stop: StopFlag) -> None:
    """Bring the nodes together, pass a stop on, show that we live; until all have ended, or should have."""
    introduced = asked = False
    told_at, ending_since = time.monotonic(), None
    while any(agent.process.poll() is None for agent in agents):
        words, now = agents[0].words, time.monotonic()
        if not introduced and "invitation" in words:
            introduced = True
            for agent in agents[1:]:
                remote.write(agent.process, _line({"invitation": words["invitation"]}))
        if stop.signal is not None and not asked:
            asked = True
            remote.write(agents[0].process, _line({"signal": stop.signal.name}))
        if now - told_at > ALIVE_SECONDS:
            told_at = now
            for agent in agents:
                remote.write(agent.process, _line({"alive": True}))
        if ending_since is None and any(agent.process.poll() is not None for agent in agents):
            ending_since = now
        patience = FINISH_SECONDS if "ended" in words else END_SECONDS
        if "keeping" in words and "ended" not in words and agents[0].process.poll() is None:
            ending_since = None  # the others may go; the first one sends what is left to where runs are kept
        if ending_since is not None and now - ending_since > patience:
            return
        time.sleep(POLL_SECONDS)


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _process_here(job: Job) -> int | None:
    """The process of the command that looks after it, if that is on this machine."""
    number, _, host = job.id.partition("@")
    return int(number) if host == socket.gethostname() else None


def state(job: Job) -> str | None:
    process = _process_here(job)
    if process is None:
        return f"looked after by process {job.id}" if time.time() - job.alive < 4 * LIFE_SECONDS else None
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return None
    return "running" if job.alive and b"fortyfold" in command and b"train" in command else None


def cancel(job: Job, run_dir: RunDir) -> None:
    process = _process_here(job)
    if process is None:
        ask_to_stop(run_dir)
    else:
        os.kill(process, signal.SIGINT)
