"""TensorBoard's event file in the run's tensorboard/: the x axis ("step" there) is examples seen, the time the run's.

Written by TensorBoard's own record writer: its EventFileWriter would import TensorFlow where that is installed, and
writes in a thread whose failures come late. A new file, whose first entry tells TensorBoard to forget what it read,
takes the place of the one before. That is emptied at first and removed the next time: a TensorBoard that follows a
file does not get past it when it is gone.
"""

import os
import time

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from fortyfold.metrics.points import Point
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.run_dir import RunDir

SUFFIX = ".fortyfold"


class TensorBoardSink:
    def __init__(self, run_dir: RunDir) -> None:
        folder = run_dir.tensorboard
        self.place = str(folder)
        folder.mkdir(exist_ok=True)
        before = list(folder.glob(f"events.out.tfevents.*{SUFFIX}"))
        path = (
            folder / f"events.out.tfevents.{time.time():.6f}{SUFFIX}"
        )  # TensorBoard reads files in their names' order
        self._writer = RecordWriter(path.open("wb"))
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._add(Event(wall_time=time.time(), step=0, session_log=SessionLog(status=SessionLog.START)))
        self._writer.flush()
        for old in before:
            if old.stat().st_size:
                os.truncate(old, 0)
            else:
                old.unlink()

    def write(self, points: list[Point]) -> None:
        for point in points:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()]
            self._add(Event(wall_time=point.time, step=point.examples_seen, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())


def open_sink(run_dir: RunDir, recipe: Recipe) -> TensorBoardSink:
    return TensorBoardSink(run_dir)
