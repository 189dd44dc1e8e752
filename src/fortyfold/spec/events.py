"""Events: what happens now and then in a run, one JSON object a line, one file a rank.

Ranks other than 0 write only what is their own: started, noted, quarantined, failed. Each event has `time` (Unix
seconds), `attempt`, `step` (steps done) and `kind`:

    started      num_steps, num_epochs, train_images, val_images, classes, model, device, decoder, host, process,
                 versions, git_commit, command; rank 0's also ranks: how many train together (absent: one)
    resumed      checkpoint; passed_over names those that were torn or altered, and why
    evaluated    epoch, top1, top5 (per cent, of the centre crops), loss, and the same with rect_ (of rectangles),
                 flip_ (of the mean with the mirror image), ema_ (of the moving average) before them, if wanted;
                 with replicas consensus_distance, and local_top1 of each rank's own network, if wanted;
                 num_images, unreadable, px, train_loss, lr, seconds,
                 elapsed_seconds (wall time of the run over all attempts, without work that a kill undid)
    saved        checkpoint, best
    noted        message: for whoever reads along
    accumulating phase, px, global_batch, accumulate: a step did not fit into memory, from now on in so many pieces
    quarantined  sample, path, reason: an unreadable training image
    diverged     loss, samples: the step whose loss was not finite, and what it was trained on
    stopped      reason, signal
    failed       message, traceback
    finished     elapsed_seconds
"""

import json
import os
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def open_for_append(path: Path) -> int:
    """A descriptor at the end of the last whole line; a torn last line is cut off."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    os.ftruncate(descriptor, whole)
    os.lseek(descriptor, whole, os.SEEK_SET)
    return descriptor


class EventReader:
    """Follows one rank's events: each `poll` gives the whole lines that came since the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def poll(self) -> list[Event]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [event for line in whole.splitlines() if (event := _parse(line)) is not None]


def read_events(path: Path) -> list[Event]:
    """All whole events of a rank, in the order they happened."""
    return EventReader(path).poll()


def last_attempt(events: list[Event]) -> int:
    """The number of the last attempt that the events tell of; 0 when there was none."""
    return max((event.get("attempt", 0) for event in events), default=0)


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None  # a damaged line says nothing; the others still do
    return event if isinstance(event, dict) and "kind" in event else None
