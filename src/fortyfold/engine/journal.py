"""The writing side of the run directory: a record a step, an event now and then.

Losses stay on the device until a flush, about once a second: that is the only place where the loop waits
for the device. A flush also finds a loss that is not finite.
"""

import json
import math
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from fortyfold.spec import events, records
from fortyfold.spec.run_dir import RunDir, fsync_folder

FLUSH_SECONDS = 1.0


class NotFinite(Exception):
    """The loss of `step` is NaN or infinite."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"the loss of step {step} is {loss}")
        self.step = step
        self.loss = loss


class Journal:
    """One rank's records and events."""

    def __init__(self, run_dir: RunDir, attempt: int, steps_done: int = 0, rank: int = 0) -> None:
        self._attempt = attempt
        self._steps = records.open_for_append(run_dir.steps(rank))
        self._events = events.open_for_append(run_dir.events(rank))
        fsync_folder(run_dir.path)
        self._pending: list[tuple[float | int, ...]] = []
        self._losses: list[torch.Tensor] = []
        self._last_flush = time.monotonic()
        self.steps_done = steps_done
        self.not_finite: NotFinite | None = None  # the first loss that was not; nothing after it is to be saved
        self.loss_sum = 0.0  # over images, since reset_loss
        self.images = 0

    def step(self, loss: torch.Tensor, **fields: float) -> None:
        """Note a step: every field of STEP_DTYPE but attempt, end_time and loss."""
        fields |= {"attempt": self._attempt, "end_time": time.time(), "loss": 0.0}
        self._pending.append(tuple(fields[name] for name in records.STEP_DTYPE.names or ()))
        self._losses.append(loss)
        self.steps_done += 1
        if time.monotonic() - self._last_flush >= FLUSH_SECONDS:
            self.flush()

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Write an event at once. `step` is how many steps are done."""
        event = {"time": time.time(), "attempt": self._attempt, "step": step, "kind": kind, **fields}
        _write_all(self._events, json.dumps(event).encode() + b"\n")

    def flush(self, *, durable: bool = False) -> None:
        """Write what is pending, and look whether the losses are finite. `durable` waits for the disk."""
        self._last_flush = time.monotonic()
        values = torch.stack(self._losses).tolist() if self._losses else []  # waits for the device
        block = np.array(self._pending, records.STEP_DTYPE)
        block["loss"] = values
        self._pending, self._losses = [], []
        _write_all(self._steps, block.tobytes())
        if durable:
            os.fsync(self._steps)
            os.fsync(self._events)
        self._check(block, values)

    def _check(self, block: records.Records, values: list[float]) -> None:
        for row, value in zip(block, values, strict=True):
            if not math.isfinite(value):
                self.not_finite = self.not_finite or NotFinite(int(row["step"]), value)
                return
            self.loss_sum += value * int(row["images"])
            self.images += int(row["images"])

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Whatever ends the work inside by an exception is an event, too."""
        try:
            yield
        except Exception as error:
            with suppress(OSError):  # a full disk must not hide why
                message, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
                self.event("failed", self.steps_done, message=message, traceback=trace)
            raise

    def reset_loss(self, loss_sum: float = 0.0, images: int = 0) -> None:
        """Start a new mean of the training loss."""
        self.loss_sum, self.images = loss_sum, images

    def close(self) -> None:
        os.close(self._steps)
        os.close(self._events)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
