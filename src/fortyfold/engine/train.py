"""Training in one run directory: the loop, what happens between steps, and the end.

The loop reads straight down and has no callbacks; everything it has to say goes to the run directory.
"""

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fortyfold.data import order
from fortyfold.data.reader import Batch
from fortyfold.data.requests import shape_at, train_requests
from fortyfold.data.stage import Staged
from fortyfold.engine import checkpoint
from fortyfold.engine.attempt import build_spec, check_run, open_attempt, require_same, require_shared
from fortyfold.engine.between_steps import as_evaluated, evaluate_now, evaluation_due, note_saved, quarantine, save_now
from fortyfold.engine.device import DeviceBatch, describe
from fortyfold.engine.journal import Journal, NotFinite
from fortyfold.engine.memory import advice, is_out_of_memory, remember, telling
from fortyfold.engine.precision import numerics
from fortyfold.engine.progress import Progress
from fortyfold.engine.setup import Job, Own, Training, note_start, open_job, set_up
from fortyfold.parallel.pulse import Pulse
from fortyfold.parallel.ranks import Ranks, is_broken_connection
from fortyfold.schedules import build_schedule
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.events import last_attempt, read_events
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.run_dir import RunDir, write_json
from fortyfold.spec.stop import StopFlag, stop_reason
from fortyfold.spec.timeline import Stretch


@dataclass(frozen=True)
class Outcome:
    finished: bool
    progress: Progress
    reason: str | None = None
    """Why it stopped, when it is not finished."""
    already: bool = False
    """It had been finished before."""


def train(
    recipe: Recipe,
    run_dir: RunDir,
    stop: StopFlag,
    command: Sequence[str] = (),
    staged: Staged | None = None,
    *,
    own: Own | None = None,
    auto_accumulate: bool = False,
    ranks: Ranks | None = None,
    pulse: Pulse | None = None,
) -> Outcome:
    """Train `recipe` in `run_dir`, going on from its newest whole checkpoint if there is one.

    `staged` is a copy of data.root (data/stage.py) to read instead; `own` are the caller's own parts.
    `auto_accumulate` cuts steps that do not fit into memory into more micro-batches. With several `ranks` each calls
    this; rank 0 holds the run, and writes what there is once. `pulse` then tells of ranks that do not get on.
    """
    ranks = ranks or Ranks()
    job = open_job(recipe, run_dir, staged.root if staged else None, own, ranks)
    build_schedule(recipe, job.timeline)  # a wrong name is found before anything is written
    with run_dir.hold() if ranks.first else nullcontext():
        try:
            spec = ranks.from_first(lambda: _open_run(job, command))
            require_same(spec, build_spec(job, command), ranks)
            snapshot, passed_over = checkpoint.read_newest(run_dir, ranks)
            if snapshot is not None and job.is_finished(snapshot.progress):
                return _finished_already(job, snapshot)
            attempt = ranks.from_first(lambda: open_attempt(run_dir, spec, passed_over))
            if not ranks.apart:
                require_shared(run_dir, attempt)
            steps_done = snapshot.progress.step if snapshot else 0
            rank = ranks.world.rank
            with closing(Journal(run_dir, attempt, steps_done, rank)) as journal, journal.noting_failure():
                note_start(job, journal, snapshot, passed_over, spec)
                if staged is not None and rank == ranks.world.node[0]:
                    journal.event("staged", steps_done, host=platform.node(), **staged.to_json())
                with numerics(recipe.precision):
                    with telling(f"before the first step, with {job.model_name} on {describe(job.device)}"):
                        t = set_up(job, journal, stop, attempt, snapshot, auto_accumulate)
                    t.pulse = pulse
                    return _train(t)
        except OSError as error:
            raise RunFailed(f"cannot go on in {run_dir.path}: {error}") from error


def _open_run(job: Job, command: Sequence[str]) -> dict[str, Any]:
    """What run.json shall say, if the run that is there can go on with it."""
    spec = build_spec(job, command)
    check_run(job.run_dir, spec, job.recipe)
    checkpoint.sweep(job.run_dir)
    return spec


def _finished_already(job: Job, snapshot: checkpoint.Snapshot) -> Outcome:
    if job.ranks.first:
        _note_finished(job.run_dir, snapshot.progress)
    if job.own_model is not None:
        job.own_model.load_state_dict(snapshot.model)
    return Outcome(True, snapshot.progress, already=True)


def _train(t: Training) -> Outcome:
    first_step = t.progress.step
    indexes = [data.train for data in t.job.phase_data]
    batches = t.reader.stream(train_requests(t.job.sampler, indexes, t.job.timeline, first_step))
    with closing(t.saver), closing(batches):
        try:
            run_steps(t, t.feed.ahead(batches))
            return _wind_up(t)
        except NotFinite as error:
            raise _not_finite(t, error) from None
        except (RuntimeError, ValueError, AssertionError, MemoryError) as error:
            if is_out_of_memory(error):
                stretch = t.job.timeline.at(t.progress.step).stretch
                raise advice(stretch, t.job.model_name, _accumulate(t, stretch), many_ranks=t.ranks.many) from error
            if (
                isinstance(error, UserError | RunFailed)
                or is_broken_connection(error)
                or t.progress.step > first_step
                or first_step == t.job.timeline.num_steps
            ):
                raise
            raise _unfit(t, error) from error


def run_steps(t: Training, batches: Iterator[Batch]) -> None:
    """Train to the end of the run, or until asked to stop. Nothing but the recipe decides the weights."""
    recipe, timeline = t.job.recipe, t.job.timeline
    learning_rate = build_schedule(recipe, timeline)
    last_end = time.perf_counter()
    while True:
        if evaluation_due(t):
            evaluate_now(t)
            last_end = time.perf_counter()
        if t.agreement.stopping is None and t.progress.step < timeline.num_steps:
            t.agreement.hear()
        if t.saver.due(t.progress.step, timeline.epochs_after(t.progress.step), t.agreement.overdue):
            save_now(t)
            last_end = time.perf_counter()
        if t.agreement.stopping is not None or t.progress.step == timeline.num_steps:
            return

        t.begin_step()
        wait_from = time.perf_counter()
        batch = next(batches)
        data_wait = time.perf_counter() - wait_from
        if batch.bad:
            quarantine(t, batch)
        t.beat()
        position = timeline.at(t.progress.step)
        lr, places = learning_rate(t.progress.step), t.job.rank_places(t.progress.step)
        loss = _backward(t, t.feed(batch), position.stretch, lr, places)
        t.learner.update(t.progress.step + 1)
        if (num_good := len(batch) - len(batch.bad)) != places:
            loss = loss * (places / max(num_good, 1))  # the mean of this rank's images that count

        now = time.perf_counter()
        t.journal.step(
            loss,
            step=t.progress.step,
            epoch=position.epoch,
            phase=position.stretch.phase,
            images=num_good,
            samples_digest=order.digest(batch.ids),
            data_wait_seconds=data_wait,
            read_seconds=batch.seconds.read,
            decode_seconds=batch.seconds.decode,
            resize_seconds=batch.seconds.resize,
            step_seconds=now - last_end,
            lr=lr,
        )
        last_end = now
        t.progress.step += 1
        t.saver.changed = True
        note_saved(t, t.saver.poll())


def _backward(t: Training, batch: DeviceBatch, stretch: Stretch, lr: float, places: float) -> torch.Tensor:
    """The batch's gradients and its loss, in as many pieces as memory wants if it may be cut."""
    while t.auto_accumulate:
        accumulate, put_back = _accumulate(t, stretch), remember(t.learner)
        try:
            return t.learner.backward(batch, lr, accumulate, places)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        except ValueError as error:  # normalisation layers take no micro-batch of one image
            if accumulate == stretch.accumulate:
                raise
            raise advice(stretch, t.job.model_name, accumulate // 2, halved=True) from error
        put_back()
        if accumulate >= len(batch):
            raise advice(stretch, t.job.model_name, accumulate, halved=True)
        t.progress.accumulate[str(stretch.phase)] = 2 * accumulate
        t.journal.event("accumulating", t.progress.step, phase=stretch.phase, px=stretch.px,
                        global_batch=stretch.global_batch, accumulate=2 * accumulate)  # fmt: skip
    return t.learner.backward(batch, lr, _accumulate(t, stretch), places)


def _accumulate(t: Training, stretch: Stretch) -> int:
    return t.progress.accumulate.get(str(stretch.phase), stretch.accumulate)


def _wind_up(t: Training) -> Outcome:
    """After the loop: the last save, and the word why it ended."""
    with t.excused("saving"):
        if t.saver.changed:
            save_now(t)
        note_saved(t, t.saver.wait())
        t.journal.flush(durable=True)
    if t.job.own_model is not None and t.ranks.many:  # what the caller gets is what was saved
        with as_evaluated(t):
            saved = {key: tensor.clone() for key, tensor in t.learner.model.state_dict().items()}
        t.learner.model.load_state_dict(saved)
    finished, number = t.job.is_finished(t.progress), t.agreement.stopping
    reason = None if finished or number is None else stop_reason(t.job.run_dir, number)
    assert finished or reason
    if t.ranks.first and finished:
        t.journal.event("finished", t.progress.step, elapsed_seconds=t.progress.elapsed_seconds)
    elif t.ranks.first and number is not None:
        why = {"reason": reason, "signal": number.name}
        t.journal.event("stopped", t.progress.step, **why)
        write_json(t.job.run_dir.stopped, {**why, "step": t.progress.step, "time": time.time()})
    return Outcome(finished, t.progress, reason)


def _note_finished(run_dir: RunDir, progress: Progress) -> None:
    """Say that a run is finished if it was killed between its last checkpoint and that word."""
    events = read_events(run_dir.events())
    if not events or events[-1]["kind"] != "finished":
        with closing(Journal(run_dir, last_attempt(events), progress.step)) as journal:
            journal.event("finished", progress.step, elapsed_seconds=progress.elapsed_seconds)


def _unfit(t: Training, error: Exception) -> UserError:
    """Why not even one step could be taken: nearly always a model that does not fit the images or the batch."""
    stretch, name = t.job.timeline.at(t.progress.step).stretch, t.job.model_name
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return UserError(
        f"{name} cannot be trained with {stretch.global_batch} images of {stretch.px} px a step: {reason}; "
        f"the traceback is in {t.job.run_dir.events()}"
    )


def _not_finite(t: Training, error: NotFinite) -> RunFailed:
    job, position = t.job, t.job.timeline.at(error.step)
    index = job.phase_data[position.stretch.phase].train
    ids = job.sampler.ids(index, position.epoch, position.step_in_epoch, shape_at(job.timeline, error.step))
    t.journal.event("diverged", error.step, loss=str(error.loss), samples=ids.tolist())
    return RunFailed(
        f"{error} (epoch {position.epoch}); try a lower optim.lr or a longer "
        f"schedule.warmup_epochs; the step's sample ids are in {job.run_dir.events()}"
    )
