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
    """Two phases of 20 steps in all. A step's figures follow from its number."""

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
        self.run_dir.steps().write_bytes(HEADER.pack(MAGIC, VERSION, STEP_DTYPE.itemsize))

    def steps(self, first: int, end: int, attempt: int = 1) -> None:
        records = np.zeros(end - first, STEP_DTYPE)
        step = np.arange(first, end)
        records["step"], records["attempt"], records["end_time"] = step, attempt, 1000 + step
        records["phase"] = step >= 16
        records["epoch"] = np.where(step < 16, step // 8, 2)
        records["images"] = np.where(step < 16, 8, 16)
        records["loss"], records["lr"] = 20 - step, 0.5
        records["step_seconds"], records["data_wait_seconds"] = attempt, 0.25
        with self.run_dir.steps().open("ab") as file:
            file.write(records.tobytes())

    def event(self, kind: str, step: int, **fields: Any) -> None:
        with self.run_dir.events().open("a") as file:
            file.write(json.dumps({"time": 1000.5 + step, "attempt": 1, "step": step, "kind": kind, **fields}) + "\n")

    def evaluation(self, step: int, **scores: float | None) -> None:
        scores = {"top1": 50.0 + step, "top5": 90.0, "rect_top1": None, **scores}
        self.event("evaluated", step, epoch=step // 8, loss=2.0, seconds=0.125, num_images=7, **scores)

    def finish(self) -> "MadeRun":
        self.steps(0, 8)
        self.evaluation(8)
        self.steps(8, 20)
        self.evaluation(20, ema_top1=71.0)
        return self
