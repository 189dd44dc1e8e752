"""What each way to agree costs and gives: the demo recipe on 4 ranks, the same seeds for all.

    .venv/bin/python benchmarks/strategies.py
    .venv/bin/python benchmarks/strategies.py --only allreduce gossip-ring --seeds 0 --procs 2

For each strategy: top-1 of the last evaluation (mean over the seeds, and standard deviation), wall time of the whole
command, bytes that a rank sends a step (counted from the parameters, as the method sends them; not measured), and the
consensus distance at the end (see docs/guides/ranks.md). More ranks than cores here, so wall time says what a step's
communication and bookkeeping cost on one machine, not how it scales; benchmarks/comm.py has links of a given rate.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fortyfold.spec.events import read_events
from fortyfold.spec.run_dir import MODEL, RunDir

WAYS = {
    "allreduce": (),
    "allreduce-bf16": ("strategy.compress=bf16",),
    "gossip-complete": ("strategy.name=gossip", "strategy.topology=complete"),
    "gossip-ring": ("strategy.name=gossip", "strategy.topology=ring"),
    "gossip-exponential": ("strategy.name=gossip", "strategy.topology=exponential"),
    "gossip-alternating_exp_ring": ("strategy.name=gossip", "strategy.topology=alternating_exp_ring"),
    "gossip-matching": ("strategy.name=gossip", "strategy.topology=matching"),
    "localsgd-2": ("strategy.name=localsgd", "strategy.sync_every=2", "strategy.together_steps=79"),
    "localsgd-8": ("strategy.name=localsgd", "strategy.sync_every=8"),
}


@dataclass(frozen=True)
class Result:
    top1: float
    seconds: float
    distance: float | None
    model_bytes: int


def train(data: Path, out: Path, way: str, seed: int, arguments: argparse.Namespace) -> Result:
    """One whole command."""
    sets = [part for change in (*WAYS[way], f"epochs={arguments.epochs}", f"seed={seed}") for part in ("--set", change)]
    command = [sys.executable, "-m", "fortyfold", "train", arguments.recipe, "--data", str(data), "--out", str(out)]
    started = time.perf_counter()
    subprocess.run([*command, "--procs", str(arguments.procs), *sets], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    run_dir = RunDir(out)
    evaluated = [event for event in read_events(run_dir.events()) if event["kind"] == "evaluated"][-1]
    size = (run_dir.checkpoints / run_dir.checkpoint_names()[0] / MODEL).stat().st_size
    return Result(evaluated["top1"], seconds, evaluated.get("consensus_distance"), size)


def sent_bytes(way: str, model_bytes: int, procs: int) -> float:
    """What a rank sends a step, at the least."""
    ring = 2 * (procs - 1) / procs  # an all-reduce by ring
    factors = {
        "allreduce": ring,
        "allreduce-bf16": ring / 2,
        "gossip-complete": procs - 1,
        "gossip-ring": min(2, procs - 1),
        "gossip-alternating_exp_ring": procs - 1,  # one node: complete
        "localsgd-2": ring / 2,
        "localsgd-8": ring / 8,
    }
    return model_bytes * factors.get(way, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--procs", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--recipe", default="smoke")
    parser.add_argument("--epochs", type=int, default=12, help="the recipe's 6 end before all ways have converged")
    parser.add_argument("--folder", type=Path, help="keep the runs there; what is trained already is not trained again")
    arguments = parser.parse_args()
    what = (
        f"{arguments.recipe}, {arguments.epochs} epochs, {arguments.procs} ranks, {len(os.sched_getaffinity(0))} cores"
    )
    print(what, flush=True)
    print(f"{'':28}{'top-1 %':>16}{'wall s':>10}{'MB/step':>10}{'distance':>10}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        demo = [sys.executable, "-m", "fortyfold", "data", "demo", str(folder / "data")]
        subprocess.run(demo, check=True, stdout=subprocess.DEVNULL)
        for way in arguments.only:
            report(folder, way, arguments)


def report(folder: Path, way: str, arguments: argparse.Namespace) -> None:
    results = [train(folder / "data", folder / f"{way}-{seed}", way, seed, arguments) for seed in arguments.seeds]
    top1 = [result.top1 for result in results]
    spread = statistics.stdev(top1) if len(top1) > 1 else 0.0
    distances = [result.distance for result in results if result.distance is not None]
    distance = f"{statistics.mean(distances):.1e}" if distances else "-"
    sent = sent_bytes(way, results[0].model_bytes, arguments.procs) / 1e6
    seconds = statistics.mean(result.seconds for result in results)
    print(
        f"{way:28}{statistics.mean(top1):>9.2f} ± {spread:.2f}{seconds:>10.1f}{sent:>10.2f}{distance:>10}  "
        f"{json.dumps(top1)}",
        flush=True,
    )


if __name__ == "__main__":
    main()
