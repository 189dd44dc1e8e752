"""A run directory written by hand, step by step, for those that read one."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fortyfold.spec.recipe_file import load_recipe
from fortyfold.spec.records import HEADER, MAGIC, STEP_DTYPE, VERSION
from fortyfold.spec.run_dir import RunDir, write_json

NUM_IMAGES = 64  # 8 steps an epoch of 8 images
PHASES = [{"epochs": 2, "px": 32}, {"epochs": 1, "px": 48, "global_batch": 16}]  # 16 steps, then 4


class MadeRun:
    """Two phases of 20 steps in all. A step's figures follow from its number, a rank's share of it from the rank's."""

    def __init__(self, folder: Path, **log: Any) -> None:
        self.run_dir = RunDir(folder)
        folder.mkdir(parents=True, exist_ok=True)
        changes = {"epochs": None, "phases": PHASES, "global_batch": 8, "log.every_steps": 5}
        self.recipe = load_recipe("tiny", changes | {f"log.{key}": value for key, value in log.items()})
        data = {"train": {"images": NUM_IMAGES}}
        spec = {
            "format": 2,
            "recipe": self.recipe.model_dump(mode="json"),
            "data": data,
            "model": "test_resnet",
            "decoder": "none",
        }
        write_json(self.run_dir.spec, spec)
        self._create_steps(0)

    def _create_steps(self, rank: int) -> None:
        self.run_dir.steps(rank).write_bytes(HEADER.pack(MAGIC, VERSION, STEP_DTYPE.itemsize))

    def start(self, attempt: int, ranks: int, step: int = 0) -> None:
        """What rank 0 says of an attempt; the ranks' files are opened."""
        fields: dict[str, Any] = {"num_steps": 20, "num_epochs": 3, "train_images": NUM_IMAGES, "classes": 4}
        fields |= {"model": "test_resnet", "device": "cpu, 1 threads", "decoder": "none"}
        self.event("started", step, attempt=attempt, ranks=ranks, **fields)
        for rank in range(ranks):
            if not self.run_dir.steps(rank).exists():
                self._create_steps(rank)

    def ranks_steps(self, first: int, end: int, attempt: int, ranks: int) -> None:
        for rank in range(ranks):
            self.steps(first, end, attempt, rank, ranks)

    def steps(self, first: int, end: int, attempt: int = 1, rank: int = 0, ranks: int = 1) -> None:
        """One rank's share: the images that are its own; the loss is such that the whole step's is 20 - step."""
        records = np.zeros(end - first, STEP_DTYPE)
        step = np.arange(first, end)
        records["step"], records["attempt"], records["end_time"] = step, attempt, 1000 + step
        records["phase"] = step >= 16
        records["epoch"] = np.where(step < 16, step // 8, 2)
        images = np.where(step < 16, 8, 16)
        records["images"] = images * (rank + 1) // ranks - images * rank // ranks
        records["loss"], records["lr"] = 20 - step, 0.5
        if ranks == 2:
            records["loss"] += 1 - 2 * rank  # halves are equal
        records["step_seconds"], records["data_wait_seconds"] = attempt, 0.25
        with self.run_dir.steps(rank).open("ab") as file:
            file.write(records.tobytes())

    def event(self, kind: str, step: int, rank: int = 0, **fields: Any) -> None:
        with self.run_dir.events(rank).open("a") as file:
            file.write(json.dumps({"time": 1000.5 + step, "attempt": 1, "step": step, "kind": kind, **fields}) + "\n")

    def evaluation(self, step: int, **scores: float | None) -> None:
        fields: dict[str, Any] = {"top1": 50.0 + step, "top5": 90.0, "rect_top1": None, **scores}
        self.event("evaluated", step, epoch=step // 8, loss=2.0, seconds=0.125, num_images=7, **fields)

    def finish(self) -> "MadeRun":
        self.steps(0, 8)
        self.evaluation(8)
        self.steps(8, 20)
        self.evaluation(20, ema_top1=71.0)
        return self
