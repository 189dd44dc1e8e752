"""A run's figures over the examples that all its ranks have seen, while it runs or afterwards.

A point for every `log.every_steps` steps: their means, over all ranks (spec/ranks.py); the learning rate and the sizes
are the last step's. And a point for each evaluation. Points come in the order of examples seen, every step is in
exactly one of them. Records are small, points are not: a poll makes so many at most, however long the run.

A restart does the steps since its checkpoint again, and what was given out for them holds no more. `Replayed` says
so: begin anew with another reader, which sees each step as the last attempt did it.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fortyfold.spec.events import Event, EventReader
from fortyfold.spec.ranks import MergedStepReader, last_num_ranks
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.records import STEP_DTYPE, Records, standing
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.timeline import build_timeline
from fortyfold.spec.world import World

MAX_POINTS = 20_000  # a poll


@dataclass(frozen=True)
class Point:
    kind: Literal["steps", "evaluation"]
    examples_seen: int
    step: int
    """How many steps were done."""
    time: float
    """When that was, in Unix seconds."""
    values: dict[str, float]


class Replayed(Exception):
    """Something that was given out was done again by a later attempt."""


class PointReader:
    """Follows a run: each `poll` gives the points that came since the last, or the first of them if `is_behind`."""

    def __init__(self, run_dir: RunDir, recipe: Recipe, num_images: int) -> None:
        self._steps = MergedStepReader(run_dir)
        self._events = EventReader(run_dir.events())
        self._every_steps = recipe.log.every_steps
        stretches = build_timeline(recipe, num_images, World(size=last_num_ranks(run_dir))).stretches
        self._px = np.array([stretch.px for stretch in stretches])
        self._global_batch = np.array([stretch.global_batch for stretch in stretches])
        self._pending = np.empty(0, STEP_DTYPE)  # steps that are in no point yet
        self._evaluations: dict[int, Event] = {}  # by steps done, in no point yet
        self._steps_given = self._examples_given = self._evaluated = 0
        self.is_behind = False  # there are more points already

    def poll(self, *, to_the_end: bool = False) -> list[Point]:
        """The new points; `to_the_end` also makes one of fewer steps than `log.every_steps`."""
        came = self._steps.poll()  # before the events: an evaluation is written before the steps that follow it
        records = np.concatenate([self._pending, came]) if len(self._pending) else came
        records = records[standing(records["step"])]
        if len(records) and records["step"][0] < self._steps_given:
            raise Replayed
        self._take_events()
        ends = self._ends(records, to_the_end)
        self.is_behind = len(ends) > MAX_POINTS
        ends = ends[:MAX_POINTS]
        self._pending = records[ends[-1] :] if len(ends) else records
        known = records[: ends[-1]] if self.is_behind else records
        points = self._evaluation_points(known) + self._step_points(known, ends)
        return sorted(points, key=lambda point: (point.step, point.kind == "evaluation"))

    def _take_events(self) -> None:
        for event in self._events.poll():
            if event["kind"] != "evaluated":
                continue
            if event["step"] <= self._evaluated or event["step"] < self._steps_given:
                raise Replayed
            self._evaluations[event["step"]] = event

    def _evaluation_points(self, records: Records) -> list[Point]:
        steps_done = int(records["step"][-1]) + 1 if len(records) else self._steps_given
        examples = np.concatenate([[0], np.cumsum(records["images"], dtype="i8")]) + self._examples_given
        points = []
        for step in sorted(step for step in self._evaluations if step <= steps_done):
            event = self._evaluations.pop(step)
            seen = examples[np.searchsorted(records["step"], step)]
            points.append(Point("evaluation", int(seen), step, event["time"], _scores(event)))
            self._evaluated = step
        return points

    def _ends(self, records: Records, to_the_end: bool) -> np.ndarray:
        """Where the stretches of records end that make a point."""
        ends = np.flatnonzero((records["step"] + 1) % self._every_steps == 0) + 1
        if to_the_end and len(records) and len(records) not in ends[-1:]:
            ends = np.append(ends, len(records))
        return ends

    def _step_points(self, records: Records, ends: np.ndarray) -> list[Point]:
        if not len(ends):
            return []
        columns = self._means(records[: ends[-1]], ends)
        last = records[ends - 1]
        seen = self._examples_given + np.cumsum(records["images"], dtype="i8")[ends - 1]
        self._steps_given, self._examples_given = int(last["step"][-1]) + 1, int(seen[-1])
        rows = zip(
            seen.tolist(), (last["step"] + 1).tolist(), last["end_time"].tolist(), *columns.values(), strict=True
        )
        return [
            Point("steps", examples, step, time, dict(zip(columns, values, strict=True)))
            for examples, step, time, *values in rows
        ]

    def _means(self, records: Records, ends: np.ndarray) -> dict[str, list[float]]:
        """A column a tag, an entry for each stretch of records that ends at `ends`."""
        starts = np.concatenate([[0], ends[:-1]])
        names, last = records.dtype.names or (), records[ends - 1]

        def total(name: str) -> np.ndarray:
            return np.add.reduceat(records[name].astype("f8"), starts)

        columns = {"losses/train": total("loss") / (ends - starts), "lr": last["lr"]}
        columns["speed/images_per_second"] = total("images") / total("step_seconds")
        for name in (name for name in names if name.endswith("_seconds")):
            columns[f"times/{name}"] = total(name) / (ends - starts)
        columns["sizes/px"] = self._px[last["phase"]]
        columns["sizes/global_batch"] = self._global_batch[last["phase"]]
        columns |= {"sizes/epoch": last["epoch"], "sizes/phase": last["phase"]}
        return {tag: column.tolist() for tag, column in columns.items()}


def _scores(event: Event) -> dict[str, float]:
    scores = {
        f"scores/{key}": value for key, value in event.items() if key.endswith(("top1", "top5")) and value is not None
    }
    return {"losses/val": event["loss"], **scores, "times/evaluate_seconds": event["seconds"]}
