"""One line about a run: its state, how far it is, how fast, how good."""

from dataclasses import dataclass

from fortyfold.metrics.summary import evaluations
from fortyfold.metrics.throughput import mean_images_per_second
from fortyfold.spec.events import Event, read_events
from fortyfold.spec.records import read_steps
from fortyfold.spec.run_dir import RunDir


@dataclass(frozen=True)
class Overview:
    name: str
    state: str
    """running, finished, stopped with the reason, failed, or killed: it ended without a word."""
    epoch: int
    """The epoch of the last step, counted from 1; 0 before the first."""
    num_epochs: int
    images_per_second: float | None
    """Mean over all steps."""
    top1: float | None
    """Of the last evaluation, per cent."""
    num_images: int
    """How many images that evaluation counted."""


def overview(run_dir: RunDir) -> Overview:
    """Read a run, live or not; the files of rank 0 suffice."""
    events = read_events(run_dir.events())
    records = read_steps(run_dir.steps())
    rows = evaluations(events)
    started = next((event for event in reversed(events) if event["kind"] == "started"), {})
    return Overview(
        name=run_dir.path.name,
        state="running" if run_dir.is_locked() else _last_state(events),
        epoch=int(records["epoch"][-1]) + 1 if len(records) else 0,
        num_epochs=started.get("num_epochs", 0),
        images_per_second=mean_images_per_second(records),
        top1=rows[-1]["top1"] if rows else None,
        num_images=rows[-1]["num_images"] if rows else 0,
    )


def _last_state(events: list[Event]) -> str:
    last = events[-1] if events else {"kind": ""}
    if last["kind"] == "stopped":
        return f"stopped: {last['reason']}"
    return last["kind"] if last["kind"] in ("finished", "failed") else "killed"
