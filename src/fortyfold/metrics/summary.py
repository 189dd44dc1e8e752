"""A row an evaluation: summary.csv, and DAWNBench's TSV.

`hours` is wall time since the start over all attempts, evaluation included; work that a kill undid is not.
"""

import csv
import io
from typing import Any

from fortyfold.spec.events import Event, read_events
from fortyfold.spec.run_dir import RunDir, write_atomically

COLUMNS = ("epoch", "step", "train_loss", "val_loss", "top1", "top5", "num_images", "px", "lr", "hours")
FURTHER = tuple(
    f"{name}{figure}" for name in ("rect_", "flip_", "ema_", "ema_rect_", "ema_flip_") for figure in ("top1", "top5")
)  # what else the recipe had evaluated; columns only where there is something to say


def evaluations(events: list[Event]) -> list[dict[str, Any]]:
    """One row for each evaluated step, in order; of one that was done again, the last holds."""
    rows = {}
    for event in events:
        if event["kind"] == "evaluated":
            row = {**event, "val_loss": event["loss"], "hours": event["elapsed_seconds"] / 3600}
            rows[event["step"]] = {column: row.get(column) for column in COLUMNS + FURTHER}
    return [rows[step] for step in sorted(rows)]


def write_summaries(run_dir: RunDir) -> None:
    """Write both files anew from the events."""
    rows = evaluations(read_events(run_dir.events()))
    write_atomically(run_dir.summary, _csv(rows).encode())
    write_atomically(run_dir.dawnbench, _dawnbench(rows).encode())


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    further = [column for column in FURTHER if any(row[column] is not None for row in rows)]
    writer = csv.DictWriter(text, [*COLUMNS, *further], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _dawnbench(rows: list[dict[str, Any]]) -> str:
    lines = ["epoch\thours\ttop1Accuracy\ttop5Accuracy"]
    lines += [f"{row['epoch']}\t{row['hours']:.6f}\t{row['top1']:.3f}\t{row['top5']:.3f}" for row in rows]
    return "\n".join(lines) + "\n"
