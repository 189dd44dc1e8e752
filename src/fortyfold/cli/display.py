"""Shows a run by following its directory: the training loop knows nothing of terminals.

In a terminal a bar with epoch, img/s, loss, top-1 and the time left; elsewhere a line every so many steps.
"""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fortyfold.metrics.throughput import mean_images_per_second
from fortyfold.spec.events import Event
from fortyfold.spec.ranks import MergedEventReader, MergedStepReader
from fortyfold.spec.records import STEP_DTYPE, Records
from fortyfold.spec.run_dir import RunDir

POLL_SECONDS = 0.5
NAMED = {
    "rect_": "rectangular",
    "flip_": "with mirror image",
    "ema_": "EMA",
    "ema_rect_": "EMA rectangular",
    "ema_flip_": "EMA with mirror image",
}  # what is scored beside the network on centre crops
WINDOW_STEPS = 50  # img/s and loss in the bar are means over so many steps


@dataclass
class View:
    """What is known of a run, from its files."""

    num_steps: int = 0
    num_epochs: int = 0
    top1: float | None = None
    recent: Records = field(default_factory=lambda: np.empty(0, STEP_DTYPE))

    def take_event(self, event: Event) -> None:
        if event["kind"] == "started":
            self.num_steps, self.num_epochs = event["num_steps"], event["num_epochs"]
        if event["kind"] == "evaluated":
            self.top1 = event["top1"]

    def take_records(self, records: Records) -> None:
        self.recent = np.concatenate([self.recent, records])[-WINDOW_STEPS:]

    @property
    def steps_done(self) -> int:
        return int(self.recent["step"][-1]) + 1 if len(self.recent) else 0

    def fields(self) -> dict[str, Any]:
        """The figures of the bar, as text."""
        if not len(self.recent):
            return dict.fromkeys(("epoch", "speed", "loss", "top1", "eta"), "")
        seconds = float(self.recent["step_seconds"].mean()) * (self.num_steps - self.steps_done)
        return {
            "epoch": f"epoch {self.recent['epoch'][-1] + 1}/{self.num_epochs}",
            "speed": f"{mean_images_per_second(self.recent) or 0:.0f} img/s",
            "loss": f"loss {self.recent['loss'].mean():.3f}",
            "top1": "" if self.top1 is None else f"top-1 {self.top1:.1f} %",
            "eta": f"{duration(seconds)} left",
        }


class Display:
    """Follows a run from now on, in a thread, until the context is left."""

    def __init__(self, run_dir: RunDir, line_steps: int) -> None:
        self._steps = MergedStepReader(run_dir)
        self._events = MergedEventReader(run_dir)
        self._steps.skip()  # what was before is not shown again
        self._events.poll()
        self._view = View()
        self._line_steps = line_steps
        self._since_line = np.empty(0, STEP_DTYPE)
        self._said: SimpleQueue[str] = SimpleQueue()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="display", daemon=True)

    def __enter__(self) -> "Display":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def say(self, text: str) -> None:
        """Show a line, from any thread."""
        self._said.put(text)

    def _follow(self) -> None:
        if not sys.stdout.isatty():
            return self._loop(lambda text: print(text, flush=True), self._print_lines)
        columns = [TextColumn("{task.fields[" + name + "]}", markup=False) for name in self._view.fields()]
        with Progress(columns[0], BarColumn(), *columns[1:], transient=True) as progress:
            task = progress.add_task("training", total=None, **self._view.fields())
            say: Callable[[str], Any] = lambda text: progress.console.print(text, highlight=False, markup=False)  # noqa: E731
            return self._loop(say, lambda records: self._move_bar(progress, task))

    def _loop(self, say: Callable[[str], Any], show_steps: Callable[[Records], None]) -> None:
        last_round = False
        while not last_round:
            last_round = self._done.wait(POLL_SECONDS)
            records = self._steps.poll()  # before the events: a step is shown before what came of it
            self._view.take_records(records)
            show_steps(records)
            for event in self._events.poll():
                self._view.take_event(event)
                if text := describe(event, self._view.num_epochs):
                    say(text)
            while not self._said.empty():
                say(self._said.get())

    def _move_bar(self, progress: Progress, task: TaskID) -> None:
        view = self._view
        progress.update(task, completed=view.steps_done, total=view.num_steps or None, **view.fields())

    def _print_lines(self, records: Records) -> None:
        self._since_line = np.concatenate([self._since_line, records])
        while len(self._since_line) >= self._line_steps:
            lines, self._since_line = np.split(self._since_line, [self._line_steps])
            last = lines[-1]
            print(
                f"step {last['step'] + 1}/{self._view.num_steps}  epoch {last['epoch'] + 1}  "
                f"{mean_images_per_second(lines) or 0:.0f} img/s  loss {lines['loss'].mean():.3f}  "
                f"lr {last['lr']:.4g}  (means of {len(lines)} steps)",
                flush=True,
            )


def describe(event: Event, num_epochs: int) -> str | None:
    """An event as a line for people; None for those that are not news."""
    match event["kind"]:
        case "started":
            return (
                f"{event['model']} on {_place(event)}: {event['train_images']} images of {event['classes']} classes, "
                f"{event['num_epochs']} epochs, {event['num_steps']} steps; "
                f"decoder: {event['decoder'].partition(',')[0]}"
            )
        case "resumed":
            skipped = "".join(f"passed over {name}: {why}\n" for name, why in event["passed_over"].items())
            return f"{skipped}going on from {event['checkpoint'] or 'the start'} (step {event['step']})"
        case "evaluated":
            left_out = f", {len(event['unreadable'])} unreadable left out" if event["unreadable"] else ""
            return (
                f"epoch {event['epoch']}/{num_epochs}  "
                f"top-1 {event['top1']:.1f} % ({event['num_images']} images{left_out})  "
                f"top-5 {event['top5']:.1f} %  val loss {event['loss']:.3f}  "
                f"train loss {event['train_loss']:.3f}{_further_scores(event)}"
            )
        case "noted":
            return f"note: {event['message']}"
        case "accumulating":
            return (
                f"out of memory in phase {event['phase']}, {event['global_batch']} images of {event['px']} px a step: "
                f"going on in {event['accumulate']} micro-batches"
            )
        case "quarantined":
            return f"left out the unreadable {event['path']}: {event['reason']}"
    return None


def _place(started: Event) -> str:
    ranks, device = started.get("ranks", 1), started["device"]
    return str(device) if ranks == 1 else f"{ranks} ranks ({device})"


def _further_scores(event: Event) -> str:
    there = [(words, event.get(f"{name}top1")) for name, words in NAMED.items()]
    return "".join(f"  {words} top-1 {top1:.1f} %" for words, top1 in there if top1 is not None)


def duration(seconds: float) -> str:
    """1h 02m, 3m 20s or 12s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"
