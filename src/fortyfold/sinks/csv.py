"""points.csv in the run directory: a row a point, a column a tag; what a point does not have is left empty.

Figures have 7 digits: the step records are of single precision. Rows are appended; a tag that comes up for the first
time (the first evaluation's, usually) is a new column, for which the file is replaced by a whole one.
"""

import csv
import io
from typing import BinaryIO

from fortyfold.metrics.points import Point
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.run_dir import RunDir, write_atomically

HEAD = ("examples_seen", "step", "time")


class CsvSink:
    def __init__(self, run_dir: RunDir) -> None:
        self._path = run_dir.points_csv
        self.place = str(self._path)
        self._tags: dict[str, None] = {}  # a set that keeps its order
        self._file = self._replace(b"")

    def write(self, points: list[Point]) -> None:
        known = len(self._tags)
        self._tags |= {tag: None for point in points for tag in point.values}
        if len(self._tags) > known:
            self._widen(len(self._tags) - known)
        self._file.write(self._rows(points).encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _widen(self, num_columns: int) -> None:
        """Give the rows that are there so many empty columns more."""
        self._file.seek(0)
        _, _, rows = self._file.read().partition(b"\n")
        self._file.close()
        self._file = self._replace(rows.replace(b"\n", b"," * num_columns + b"\n"))

    def _replace(self, rows: bytes) -> BinaryIO:
        """A new file with the columns of now; gives it opened, at its end."""
        head = ",".join([*HEAD, *self._tags]) + "\n"
        write_atomically(self._path, head.encode() + rows)
        return self._path.open("a+b")

    def _rows(self, points: list[Point]) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for point in points:
            figures = [f"{point.values[tag]:.7g}" if tag in point.values else "" for tag in self._tags]
            writer.writerow([point.examples_seen, point.step, f"{point.time:.3f}", *figures])
        return text.getvalue()


def open_sink(run_dir: RunDir, recipe: Recipe) -> CsvSink:
    return CsvSink(run_dir)
