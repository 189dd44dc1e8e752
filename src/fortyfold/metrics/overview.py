"""One line about a run: its state, how far it is, how fast, how good."""

from dataclasses import dataclass

from fortyfold.metrics.summary import evaluations
from fortyfold.metrics.throughput import mean_images_per_second
from fortyfold.spec.events import Event, last_attempt, read_events
from fortyfold.spec.ranks import num_ranks, read_merged_steps
from fortyfold.spec.run_dir import RunDir


@dataclass(frozen=True)
class Overview:
    name: str
    state: str
    """running, finished, stopped with the reason, failed, not begun, or killed: it ended without a word."""
    epoch: int
    """The epoch of the last step, counted from 1; 0 before the first."""
    num_epochs: int
    images_per_second: float | None
    """Of all ranks together, mean over all steps."""
    top1: float | None
    """Of the last evaluation, per cent."""
    num_images: int
    """How many images that evaluation counted."""


def overview(run_dir: RunDir) -> Overview:
    """Read a run, live or not."""
    events = read_events(run_dir.events())
    records = read_merged_steps(run_dir)
    rows = evaluations(events)
    started = next((event for event in reversed(events) if event["kind"] == "started"), {})
    return Overview(
        name=run_dir.path.name,
        state="running" if run_dir.is_locked() else _last_state(run_dir, events),
        epoch=int(records["epoch"][-1]) + 1 if len(records) else 0,
        num_epochs=started.get("num_epochs", 0),
        images_per_second=mean_images_per_second(records),
        top1=rows[-1]["top1"] if rows else None,
        num_images=rows[-1]["num_images"] if rows else 0,
    )


def _last_state(run_dir: RunDir, events: list[Event]) -> str:
    if not events:
        return "not begun"
    last = events[-1]
    if last["kind"] == "stopped":
        return f"stopped: {last['reason']}"
    if last["kind"] in ("finished", "failed"):
        return str(last["kind"])
    return "failed" if _another_failed(run_dir, events) else "killed"


def _another_failed(run_dir: RunDir, events: list[Event]) -> bool:
    """Whether another rank failed in the last attempt: rank 0 may have been killed for it, before it could say so."""
    attempt = last_attempt(events)
    others = [read_events(run_dir.events(rank)) for rank in range(1, num_ranks(events).get(attempt, 1))]
    return any(event["kind"] == "failed" and event["attempt"] == attempt for events in others for event in events)
