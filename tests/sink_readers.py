"""Reads back what each sink wrote, by the means of those it was written for."""

import csv
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fortyfold.spec.run_dir import RunDir

Rows = list[tuple[int, dict[str, float]]]
"""(examples seen, tag → value), in the file's order."""


def read_csv(run_dir: RunDir) -> Rows:
    with run_dir.points_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    head = ("examples_seen", "step", "time")
    return [
        (int(row["examples_seen"]), {tag: float(text) for tag, text in row.items() if tag not in head and text})
        for row in rows
    ]


def read_tensorboard(run_dir: RunDir) -> Rows:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run_dir.tensorboard), size_guidance={"scalars": 0})
    events.Reload()
    rows: dict[tuple[int, float], dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for scalar in events.Scalars(tag):
            values = rows.setdefault((scalar.step, scalar.wall_time), {})
            assert tag not in values
            values[tag] = scalar.value
    return [(step, values) for (step, _), values in sorted(rows.items(), key=lambda row: row[0])]


def read_wandb(run_dir: RunDir) -> Rows:
    rows = []
    for record in read_wandb_records(run_dir):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            named = {key: value for key, value in items.items() if "/" in key or key == "lr"}
            rows.append((items["examples_seen"], {k: v for k, v in named.items() if not k.startswith("last/")}))
    return rows


def read_wandb_records(run_dir: RunDir) -> list[Any]:
    """The records of an offline run's file: a 7-byte header, then LevelDB's log format, each a protobuf.

    wandb's service writes it, and on a busy machine is not done with it when the run is; the last record is `exit`.
    """
    from wandb.proto import wandb_internal_pb2

    (path,) = run_dir.wandb.glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 60
    while True:
        try:
            records = [wandb_internal_pb2.Record.FromString(data) for data in _log_records(path)]
        except struct.error:  # half a record
            records = []
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < deadline, f"{path} is not finished"
        time.sleep(0.05)


def _log_records(path: Path) -> list[bytes]:
    content, offset, records, begun = path.read_bytes(), 7, [], b""
    while offset < len(content):
        if 32768 - offset % 32768 < 7:  # a block's end that no header fits in
            offset += 32768 - offset % 32768
            continue
        _, num_bytes, kind = struct.unpack_from("<IHB", content, offset)
        begun += content[offset + 7 : offset + 7 + num_bytes]
        offset += 7 + num_bytes
        if kind in (1, 4):  # whole, or the last part
            records.append(begun)
            begun = b""
    return records


READERS: dict[str, Callable[[RunDir], Rows]] = {
    "csv": read_csv,
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
}
