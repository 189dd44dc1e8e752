"""One rank of a run: what torchrun starts on every node. The job is in FORTYFOLD_JOB (launch/environment.py).

What it has to say goes to the run directory. However it ends, its last word reaches the launcher, and the other ranks:
an error of its own, or whose end it noticed.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from fortyfold.parallel.failure import report
from fortyfold.parallel.pulse import Pulse
from fortyfold.parallel.ranks import is_broken_connection, joined, world_from_environment
from fortyfold.spec.failure import name_ranks
from fortyfold.spec.parent import die_with_parent
from fortyfold.spec.recipe_file import parse_recipe
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag, read_request

_PATIENCE_SECONDS = 10.0  # for who is to blame


def main() -> None:
    die_with_parent()
    stop = StopFlag().listen()  # before anything takes long
    job = json.loads(os.environ["FORTYFOLD_JOB"])
    run_dir, world = RunDir(Path(job["run"])), world_from_environment()
    _write_to(run_dir.rank_log(world.rank))
    recipe = parse_recipe(job["recipe"], source="the launcher")
    pulse = Pulse.from_environment(world, recipe.strategy.deadline_seconds)
    if world.rank == 0:
        pulse.check_requests = lambda: stop.ask_if(read_request(run_dir))
    pulse.start()
    try:
        _train(job, recipe, run_dir, stop, pulse)
    except BaseException as error:
        _last_word(error, pulse)
        sys.stderr.flush()
        os._exit(1)  # threads of the process group may wait for ranks that are gone
    pulse.close()


def _train(job: dict[str, Any], recipe: Any, run_dir: RunDir, stop: StopFlag, pulse: Pulse) -> None:
    from fortyfold.engine.train import train

    staged = Path(job["staged"]) if job["staged"] else None
    with joined(recipe.seed) as ranks:
        train(recipe, run_dir, stop, job["command"], staged, ranks=ranks, pulse=pulse)


def _last_word(error: BaseException, pulse: Pulse) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's, now: another rank has failed, too
    if not is_broken_connection(error):
        report(error)
        pulse.note_failure(str(error) or type(error).__name__)
        return
    culprits = dict(pulse.missing(_PATIENCE_SECONDS))
    pulse.close()
    if culprits:
        told = ", ".join(sorted(set(culprits.values())))
        error = RuntimeError(f"{name_ranks(sorted(culprits))} ended ({told})")
    report(error, "consequence", tuple(culprits))


def _write_to(log: Path) -> None:
    """All output of this process, its libraries' too, goes to the rank's log from here on."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


if __name__ == "__main__":
    main()
