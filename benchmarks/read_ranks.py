"""How long it takes to read a run of many ranks as one, over reading its bytes alone.

    .venv/bin/python benchmarks/read_ranks.py --ranks 40 --steps 100000

Writes such a run, with a restart in its middle, to a temporary folder, and reads it several times; the files are in the
page cache then. Memory is the process's peak, most of which is the result: 64 bytes a step.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fortyfold.spec.ranks import read_merged_steps
from fortyfold.spec.records import HEADER, MAGIC, STEP_DTYPE, VERSION
from fortyfold.spec.run_dir import RunDir

ROUNDS = 5
REPLAYED_STEPS = 1000


def write_run(run_dir: RunDir, ranks: int, num_steps: int) -> None:
    """Two attempts; the second begins some steps before the end of the first."""
    half = num_steps // 2
    steps = np.concatenate([np.arange(half), np.arange(max(0, half - REPLAYED_STEPS), num_steps)])
    records = np.zeros(len(steps), STEP_DTYPE)
    records["step"], records["attempt"] = steps, np.where(np.arange(len(steps)) < half, 1, 2)
    records["images"], records["loss"], records["step_seconds"] = 32, 1.5, 0.25
    for rank in range(ranks):
        run_dir.steps(rank).write_bytes(HEADER.pack(MAGIC, VERSION, STEP_DTYPE.itemsize) + records.tobytes())
    started = [{"kind": "started", "attempt": attempt, "step": 0, "ranks": ranks} for attempt in (1, 2)]
    run_dir.events().write_text("".join(json.dumps(event) + "\n" for event in started), encoding="utf-8")


def median_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder))
        write_run(run_dir, options.ranks, options.steps)
        merged = median_seconds(lambda: read_merged_steps(run_dir))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        assert len(read_merged_steps(run_dir)) == options.steps
        bare = median_seconds(lambda: [run_dir.steps(rank).read_bytes() for rank in range(options.ranks)])
    print(f"{options.ranks} ranks, {options.steps} steps, medians of {ROUNDS} rounds")
    print(f"merged {merged:.3f} s, bytes alone {bare:.3f} s, ratio {merged / bare:.1f}; peak memory {memory:.0f} MB")


if __name__ == "__main__":
    main()
