"""points.csv in the run directory: a row a point, a column a tag; what a point does not have is left empty.

Figures have 7 digits: the step records are of single precision. Rows are appended; a tag that comes up for the first
time (the first evaluation's, usually) is a new column, for which the file is replaced by a whole one.
"""

import csv
import io

from fortyfold.metrics.points import Point
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.run_dir import RunDir, write_atomically

HEAD = ("examples_seen", "step", "time")


class CsvSink:
    def __init__(self, run_dir: RunDir) -> None:
        self._path = run_dir.points_csv
        self.place = str(self._path)
        self._points: list[Point] = []
        self._tags: dict[str, None] = {}  # a set that keeps its order
        self._replace()

    def write(self, points: list[Point]) -> None:
        self._points += points
        known = len(self._tags)
        self._tags |= {tag: None for point in points for tag in point.values}
        if len(self._tags) > known:
            self._replace()
        elif points:
            with self._path.open("a", encoding="utf-8", newline="") as file:
                file.write(self._rows(points))

    def close(self) -> None:
        pass

    def _replace(self) -> None:
        head = ",".join([*HEAD, *self._tags]) + "\n"
        write_atomically(self._path, (head + self._rows(self._points)).encode())

    def _rows(self, points: list[Point]) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for point in points:
            figures = [f"{point.values[tag]:.7g}" if tag in point.values else "" for tag in self._tags]
            writer.writerow([point.examples_seen, point.step, f"{point.time:.3f}", *figures])
        return text.getvalue()


def open_sink(run_dir: RunDir, recipe: Recipe) -> CsvSink:
    return CsvSink(run_dir)
