"""Kill a run at random moments, start it again each time, and compare the end with an undisturbed run's.

    .venv/bin/python benchmarks/kill_resume.py --kills 20
    .venv/bin/python benchmarks/kill_resume.py --kills 20 --everything    # with EMA, mixing, accumulation and the rest

Every other kill waits for a checkpoint in the making and strikes inside the save. The weights, the
optimiser's state and the generators must be the same bytes, and every step must have used the same samples.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fortyfold.data.demo import DemoSpec, make_demo
from fortyfold.spec.events import last_attempt, read_events
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


def train_command(run_dir: RunDir, data: Path, kills: int, options: Sequence[str]) -> list[str]:
    """`tiny` with a save every other step, long enough to be hit so often."""
    command = [sys.executable, "-m", "fortyfold", "train", "tiny", "--data", str(data), "--out", str(run_dir.path)]
    return [
        *command,
        "--epochs",
        str(EPOCHS_A_KILL * (kills + 1)),
        "--set",
        "checkpoint.every_steps=2",
        *_sets(options),
    ]


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
    records = read_steps(run_dir.steps())
    assert np.array_equal(records["step"], np.arange(len(records))), "a step is missing"
    hashes = {name: entry["sha256"] for name, entry in files.items()}
    return hashes, records["step"].tolist(), records["samples_digest"].tolist()


def drill(folder: Path, data: Path, kills: int, seed: int, options: Sequence[str] = ()) -> None:
    """Raises AssertionError if the killed run ends otherwise than the undisturbed one."""
    calm, struck = RunDir(folder / "calm"), RunDir(folder / "struck")
    subprocess.run(train_command(calm, data, kills, options), check=True, stdout=subprocess.DEVNULL)
    rng = random.Random(seed)
    command = train_command(struck, data, kills, options)
    for number in range(kills):
        print(f"kill {number + 1}: {strike(command, struck, rng, inside_save=number % 2 == 1)}", flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    attempts = last_attempt(read_events(struck.events()))
    assert fingerprint(struck) == fingerprint(calm), f"after {attempts} attempts the run ended otherwise"
    print(f"{attempts} attempts; weights SHA-256 {fingerprint(struck)[0]['model.safetensors'][:16]}… as undisturbed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--everything", action="store_true", help="with every option that has a state or a draw")
    arguments = parser.parse_args()
    options = EVERYTHING if arguments.everything else ()
    with tempfile.TemporaryDirectory() as folder:
        make_demo(Path(folder) / "data", DEMO)
        drill(Path(folder), Path(folder) / "data", arguments.kills, arguments.seed, options)


if __name__ == "__main__":
    main()
