"""A worker that does as it is told: FORTYFOLD_JOB holds, for each rank, what it does in each attempt.

It imports no torch, so that it starts fast. Acts are words with a colon: "save:3" makes a checkpoint of step 3,
"raise:text", "user:text", "kill:9" (itself), "hang:" (deaf to SIGTERM), "stop:" (frozen), "obey:" (waits for the stop
request), "wait:0.3", "meet:" (waits until all ranks are there in this attempt).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from fortyfold.parallel import failure
from fortyfold.spec.errors import UserError
from fortyfold.spec.parent import die_with_parent
from fortyfold.spec.run_dir import RunDir

RANK = int(os.environ["RANK"])


def act(word: str, value: str, run_dir: RunDir) -> None:
    match word:
        case "save":
            (run_dir.checkpoints / f"step-{int(value):09d}-0001").mkdir(parents=True, exist_ok=True)
        case "raise":
            raise ValueError(value)
        case "user":
            raise UserError(value)
        case "kill":
            os.kill(os.getpid(), int(value))
        case "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "obey":
            while not run_dir.stop_request.exists():
                time.sleep(0.02)
            run_dir.stopped.write_bytes(run_dir.stop_request.read_bytes())
        case "wait":
            time.sleep(float(value))
        case "meet":
            while len({len(diary.read_text().splitlines()) for diary in diaries(run_dir)}) > 1:
                time.sleep(0.02)


def diaries(run_dir: RunDir) -> list[Path]:
    """One a rank, with a line an attempt."""
    paths = [run_dir.path / f"rank-{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    for path in paths:
        path.touch()
    return paths


def main() -> None:
    die_with_parent()
    job = json.loads(os.environ["FORTYFOLD_JOB"])
    run_dir = RunDir(Path(job["run"]))
    diary = diaries(run_dir)[RANK]  # a line an attempt: the process, the time, its environment
    attempt = len(diary.read_text().splitlines())
    with diary.open("a") as file:
        file.write(json.dumps({"process": os.getpid(), "time": time.time(), **os.environ}) + "\n")
    print(f"rank {RANK} prints")
    acts = job["acts"][RANK]
    for word in acts[min(attempt, len(acts) - 1)].split():
        act(*word.replace("_", " ").split(":", 1), run_dir)  # type: ignore[call-arg]


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        failure.report(error)
        sys.exit(1)
