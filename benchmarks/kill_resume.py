"""Kill a run at random moments, start it again each time, and compare the end with an undisturbed run's.

    .venv/bin/python benchmarks/kill_resume.py --kills 20
    .venv/bin/python benchmarks/kill_resume.py --kills 20 --everything    # with EMA, mixing, accumulation and the rest
    .venv/bin/python benchmarks/kill_resume.py --kills 10 --procs 3 --strategy gossip --topology ring

Every other kill waits for a checkpoint in the making and strikes inside the save. The weights, the
optimiser's state and the generators must be the same bytes, and every step must have used the same samples.

With several processes a kill strikes one rank of them, any, and nothing is started again from here: one command must
get over all kills by itself, naming each rank that was struck.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fortyfold.data.demo import DemoSpec, make_demo
from fortyfold.spec.events import last_attempt, read_events
from fortyfold.spec.ranks import read_merged_steps
from fortyfold.spec.records import read_steps
from fortyfold.spec.run_dir import RunDir

DEMO = DemoSpec(classes=4, images=300, width=48, height=48, seed=0)
PATIENCE_SECONDS = 120.0
MAX_DELAY_SECONDS = 1.0
EVERYTHING = (
    "ema.decay=0.9", "accumulate=2", "optim.clip_norm=1.0", "optim.name=accumadamw", "optim.lr=0.001", "loss.name=bce",
    "augment.mixup=0.5", "augment.cutmix=0.5", "augment.mix_each=pair", "augment.policy=rand", "augment.erase=0.3",
    "augment.repeats=2", "augment.color_jitter=0.2", "model.drop_path_rate=0.1", "evaluate.flip=true",
)  # fmt: skip
EPOCHS_A_KILL = 4  # a fresh start gets no further than this before it is struck
RANK_EPOCHS_A_KILL = 2  # several ranks are slower
MOST_FRUITLESS = 2  # attempts in a row that are struck before they have saved; one more and the launcher gives up


def train_command(run_dir: RunDir, data: Path, epochs: int, options: Sequence[str]) -> list[str]:
    """`tiny` with a save every other step."""
    command = [sys.executable, "-m", "fortyfold", "train", "tiny", "--data", str(data), "--out", str(run_dir.path)]
    return [*command, "--epochs", str(epochs), *_sets(["checkpoint.every_steps=2", *options])]


def _sets(options: Sequence[str]) -> list[str]:
    return [part for option in options for part in ("--set", option)]


def strike(command: list[str], run_dir: RunDir, rng: random.Random, inside_save: bool) -> str:
    """Start the run and kill it at a random moment after it began; says when that was."""
    before = last_attempt(read_events(run_dir.events()))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while last_attempt(read_events(run_dir.events())) == before and process.poll() is None:
        assert time.monotonic() < deadline, "it did not start"
        time.sleep(0.01)
    time.sleep(rng.uniform(0, MAX_DELAY_SECONDS))
    while inside_save and process.poll() is None and not _is_saving(run_dir, before + 1):
        pass
    caught = _is_saving(run_dir, before + 1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it was over before it was struck"
    return f"after {len(read_steps(run_dir.steps()))} steps" + (", inside a save" if caught else "")


def _is_saving(run_dir: RunDir, attempt: int) -> bool:
    return any(run_dir.checkpoints.glob(f".writing-*-{attempt:04d}"))


def fingerprint(run_dir: RunDir) -> tuple[dict[str, str], list[int], list[int]]:
    """Of a finished run: the SHA-256 of each file of its last checkpoint; its steps; their samples' digests."""
    newest = max(path for path in run_dir.checkpoints.iterdir() if path.name.startswith("step-"))
    files = json.loads((newest / "manifest.json").read_text())["files"]
    records = read_merged_steps(run_dir)
    assert np.array_equal(records["step"], np.arange(len(records))), "a step is missing"
    hashes = {name: entry["sha256"] for name, entry in files.items()}
    return hashes, records["step"].tolist(), records["samples_digest"].tolist()


def drill(folder: Path, data: Path, kills: int, seed: int, options: Sequence[str] = ()) -> None:
    """Raises AssertionError if the killed run ends otherwise than the undisturbed one."""
    calm, struck = RunDir(folder / "calm"), RunDir(folder / "struck")
    epochs = EPOCHS_A_KILL * (kills + 1)
    subprocess.run(train_command(calm, data, epochs, options), check=True, stdout=subprocess.DEVNULL)
    rng = random.Random(seed)
    command = train_command(struck, data, epochs, options)
    for number in range(kills):
        print(f"kill {number + 1}: {strike(command, struck, rng, inside_save=number % 2 == 1)}", flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    compare(struck, calm)


class RankDrill:
    """One command whose ranks are killed, one after the other."""

    def __init__(self, run_dir: RunDir, command: list[str], procs: int, rng: random.Random) -> None:
        self._run_dir, self._procs, self._rng = run_dir, procs, rng
        self._output = run_dir.path.with_suffix(".txt")
        with self._output.open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self._attempt, self._saved_steps, self._fruitless = 0, -1, -1
        self._struck: list[int] = []

    def strike(self, inside_save: bool) -> str:
        """Kill a rank at a random moment after all have started; says when that was."""
        self._wait(lambda: len(self._processes()) == self._procs)
        self._attempt += 1
        before = self._steps_of(self._newest())  # one that was being published by the last attempt is there by now
        self._fruitless = 0 if before > self._saved_steps else self._fruitless + 1
        self._saved_steps = before
        if self._fruitless == MOST_FRUITLESS:
            self._wait(lambda: self._steps_of(self._newest()) > before)
        time.sleep(self._rng.uniform(0, MAX_DELAY_SECONDS))
        if inside_save:
            self._wait(lambda: _is_saving(self._run_dir, self._attempt), pause=0)
        rank = self._rng.randrange(self._procs)
        caught, newest = _is_saving(self._run_dir, self._attempt), self._newest()
        os.kill(self._processes(started=self._attempt)[rank], signal.SIGKILL)
        self._struck.append(rank)
        return f"rank {rank} after {newest or 'no save'}" + (", inside a save" if caught else "")

    def end(self) -> None:
        """Wait for the run's end, which must be a good one, with a note for every kill."""
        self._wait(lambda: self._process.poll() is not None, over=True)
        told = self._output.read_text()
        assert self._process.returncode == 0, told
        notes = [line for line in told.splitlines() if "starting again" in line]
        assert len(notes) == len(self._struck), told
        for rank, note in zip(self._struck, notes, strict=True):
            assert f"rank {rank} was killed by SIGKILL" in note, note

    def close(self) -> None:
        """Nothing is left: the ranks die with it."""
        self._process.kill()
        self._process.wait()

    def _processes(self, started: int | None = None) -> dict[int, int]:
        """The processes of the attempt that comes next, or of `started`, by rank."""
        attempt = started or self._attempt + 1
        return {
            rank: event["process"]
            for rank in range(self._procs)
            for event in read_events(self._run_dir.events(rank))
            if event["kind"] == "started" and event["attempt"] == attempt
        }

    def _newest(self) -> str:
        return max(self._run_dir.checkpoint_names(), default="")

    @staticmethod
    def _steps_of(checkpoint: str) -> int:
        return int(checkpoint.split("-")[1]) if checkpoint else -1

    def _wait(self, holds: Callable[[], object], over: bool = False, pause: float = 0.01) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            ended = self._process.poll() is not None and not over
            assert not ended and time.monotonic() < deadline, self._output.read_text()
            time.sleep(pause)


def drill_ranks(folder: Path, data: Path, kills: int, seed: int, procs: int, options: Sequence[str] = ()) -> None:
    """The same with several ranks, of which one is killed at a time, and one command."""
    calm, struck = RunDir(folder / "calm"), RunDir(folder / "struck")
    epochs, options = RANK_EPOCHS_A_KILL * (kills + 1), ["evaluate.every_epochs=3", *options]
    commands = [[*train_command(run_dir, data, epochs, options), "--procs", str(procs)] for run_dir in (calm, struck)]
    subprocess.run(commands[0], check=True, stdout=subprocess.DEVNULL)
    drill = RankDrill(struck, commands[1], procs, random.Random(seed))
    try:
        for number in range(kills):
            print(f"kill {number + 1}: {drill.strike(inside_save=number % 2 == 1)}", flush=True)
        drill.end()
    finally:
        drill.close()
    compare(struck, calm)


def compare(struck: RunDir, calm: RunDir) -> None:
    attempts = last_attempt(read_events(struck.events()))
    assert fingerprint(struck) == fingerprint(calm), f"after {attempts} attempts the run ended otherwise"
    print(f"{attempts} attempts; weights SHA-256 {fingerprint(struck)[0]['model.safetensors'][:16]}… as undisturbed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--everything", action="store_true", help="with every option that has a state or a draw")
    parser.add_argument("--procs", type=int, default=1, help="ranks of the run")
    parser.add_argument("--strategy", default="allreduce")
    parser.add_argument("--topology", help="of gossip")
    arguments = parser.parse_args()
    options = list(EVERYTHING) if arguments.everything else []
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), Path(name) / "data"
        make_demo(data, DEMO)
        if arguments.procs == 1:
            drill(folder, data, arguments.kills, arguments.seed, options)
            return
        options += [f"strategy.name={arguments.strategy}"]
        options += [f"strategy.topology={arguments.topology}"] if arguments.topology else []
        drill_ranks(folder, data, arguments.kills, arguments.seed, arguments.procs, options)


if __name__ == "__main__":
    main()
