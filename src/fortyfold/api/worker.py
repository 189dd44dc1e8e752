"""One rank of several: what torchrun starts on every node. The job is in FORTYFOLD_JOB (launch/environment.py).

What it has to say goes to the run directory. However it ends, its last word reaches the launcher, and the other ranks:
an error of its own, or whose end it noticed.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fortyfold.data.stage import Staged
from fortyfold.parallel.failure import report
from fortyfold.parallel.pulse import Pulse
from fortyfold.parallel.ranks import find_far, is_broken_connection, joined, world_from_environment
from fortyfold.spec.errors import UserError
from fortyfold.spec.failure import name_ranks
from fortyfold.spec.parent import die_with_parent
from fortyfold.spec.recipe_file import parse_recipe
from fortyfold.spec.run_dir import RunDir, write_json
from fortyfold.spec.stop import REASONS, StopFlag, hearing_requests
from fortyfold.spec.world import World

_PATIENCE_SECONDS = 10.0  # for who is to blame
_REPORT_SECONDS = 0.5

Job = dict[str, Any]


def main() -> None:
    die_with_parent()
    job: Job = json.loads(os.environ["FORTYFOLD_JOB"])
    run_dir, world = RunDir(Path(job["run"])), world_from_environment()
    _write_to(run_dir.rank_log(world.rank))
    pulse = Pulse.from_environment(world, job["deadline_seconds"])
    try:
        _VERBS[job["verb"]](job, run_dir, pulse)
    except BaseException as error:
        _last_word(error, pulse)
        sys.stderr.flush()
        os._exit(1)  # threads of the process group may wait for ranks that are gone
    pulse.close()


def _train(job: Job, run_dir: RunDir, pulse: Pulse) -> None:
    stop, world = StopFlag().listen(), world_from_environment()  # before anything takes long
    _require_planned(job, world)
    pulse.start()
    from fortyfold.engine.train import train

    recipe = parse_recipe(job["recipe"], source="the launcher")
    staged = Staged.from_json(job["staged"]) if job["staged"] else None
    hearing = hearing_requests(run_dir, stop) if world.rank == 0 else nullcontext()
    with hearing, joined(recipe.seed) as ranks:
        if job.get("apart"):  # by the site's word; some may see the run directory all the same
            ranks = find_far(ranks, run_dir.launch)
        train(recipe, run_dir, stop, job["command"], staged, ranks=ranks, pulse=pulse)


def _require_planned(job: Job, world: World) -> None:
    """Nodes that do not find each other may each form a world of their own, which would train, and wrongly."""
    planned = job.get("world", world.size)
    if world.size != planned:
        raise UserError(f"rank {world.rank} is one of {world.size}, and {planned} were planned; nodes have not met")


def _evaluate(job: Job, folder: RunDir, pulse: Pulse) -> None:
    """Rank 0 writes the scores to `folder`, and now and then how far it is."""
    for number in REASONS:
        signal.signal(number, signal.SIG_DFL)
    pulse.start()
    from fortyfold.engine.scoring import find_checkpoint, open_scoring

    data = Path(job["data"]) if job["data"] else None
    with joined() as ranks:
        path = ranks.from_first(lambda: str(find_checkpoint(Path(job["target"]), job["best"])[1]))
        scoring = open_scoring(Path(path), data, job["px"], best=False)
        scores = scoring.run(_reporter(folder, ranks.first, pulse), job["flip"], ranks)
        if ranks.first:
            about = {"checkpoint": str(scoring.checkpoint), "folder": str(scoring.index.folder), "px": scoring.px}
            names = {sample: scoring.index.relative_path(sample) for sample, _ in scores[""].unreadable}
            result = {"scores": {name: asdict(score) for name, score in scores.items()}, "names": names}
            write_json(folder.scores, about | result)


def _reporter(folder: RunDir, first: bool, pulse: Pulse) -> Callable[[int, int], None]:
    told = [0.0]

    def tell(done: int, total: int) -> None:
        pulse.beat(done)
        if first and time.monotonic() - told[0] > _REPORT_SECONDS:
            told[0] = time.monotonic()
            write_json(folder.scores_progress, [done, total])

    return tell


def _check(job: Job, folder: RunDir, pulse: Pulse) -> None:
    """Nothing but to meet the others."""
    _require_planned(job, world_from_environment())
    pulse.start()
    with joined() as ranks:
        ranks.gather(None)


_VERBS: dict[str, Callable[[Job, RunDir, Pulse], None]] = {"train": _train, "evaluate": _evaluate, "check": _check}


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
