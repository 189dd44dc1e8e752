"""Training in one run directory: the loop, what happens between steps, and the end.

The loop reads straight down and has no callbacks; everything it has to say goes to the run directory.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from fortyfold.data import order
from fortyfold.data.reader import Batch
from fortyfold.data.requests import shape_at, train_requests
from fortyfold.engine import checkpoint
from fortyfold.engine.attempt import build_spec, check_run, open_attempt
from fortyfold.engine.device import DeviceBatch, describe
from fortyfold.engine.evaluate import Networks, Scores, Views, evaluate_split
from fortyfold.engine.journal import Journal, NotFinite
from fortyfold.engine.memory import advice, is_out_of_memory, remember, telling
from fortyfold.engine.precision import autocast, numerics
from fortyfold.engine.progress import Progress
from fortyfold.engine.setup import Own, Training, note_start, open_job, set_up
from fortyfold.metrics.summary import write_summaries
from fortyfold.schedules import build_schedule
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.events import last_attempt, read_events
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.run_dir import RunDir, write_json
from fortyfold.spec.stop import StopFlag
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
    staged: Path | None = None,
    *,
    own: Own | None = None,
    auto_accumulate: bool = False,
) -> Outcome:
    """Train `recipe` in `run_dir`, going on from its newest whole checkpoint if there is one.

    `staged` is a copy of data.root (data/stage.py) to read instead; `own` are the caller's own parts.
    `auto_accumulate` cuts steps that do not fit into memory into more micro-batches.
    """
    job = open_job(recipe, run_dir, staged, own)
    build_schedule(recipe, job.timeline)  # a wrong name is found before anything is written
    with run_dir.hold():
        try:
            spec = build_spec(job, command)
            check_run(run_dir, spec, recipe)
            checkpoint.sweep(run_dir)
            snapshot, passed_over = checkpoint.read_newest(run_dir)
            if snapshot is not None and job.is_finished(snapshot.progress):
                _note_finished(run_dir, snapshot.progress)
                if job.own_model is not None:
                    job.own_model.load_state_dict(snapshot.model)
                return Outcome(True, snapshot.progress, already=True)
            checkpoint.retire(run_dir, passed_over)
            attempt = open_attempt(run_dir, spec)
            steps_done = snapshot.progress.step if snapshot else 0
            with closing(Journal(run_dir, attempt, steps_done)) as journal, journal.noting_failure():
                note_start(job, journal, snapshot, passed_over, spec)
                with numerics(recipe.precision):
                    with telling(f"before the first step, with {job.model_name} on {describe(job.device)}"):
                        t = set_up(job, journal, stop, attempt, snapshot, auto_accumulate)
                    return _train(t)
        except OSError as error:
            raise RunFailed(f"cannot go on in {run_dir.path}: {error}") from error


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
                raise advice(stretch, t.job.model_name, _accumulate(t, stretch)) from error
            if (
                isinstance(error, UserError | RunFailed)
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
        if _evaluation_due(t):
            _evaluate(t)
            last_end = time.perf_counter()
        if t.saver.due(t.progress.step, timeline.epochs_after(t.progress.step)):
            _save(t)
            last_end = time.perf_counter()
        if t.stop.requested or t.progress.step == timeline.num_steps:
            return

        wait_from = time.perf_counter()
        batch = next(batches)
        data_wait = time.perf_counter() - wait_from
        if batch.bad:
            _quarantine(t, batch)
        position = timeline.at(t.progress.step)
        lr = learning_rate(t.progress.step)
        loss = _backward(t, t.feed(batch), position.stretch)
        t.learner.update(t.progress.step + 1, lr)
        if batch.bad:
            loss = loss * (len(batch) / max(len(batch) - len(batch.bad), 1))  # the mean of those that count

        now = time.perf_counter()
        t.journal.step(
            loss,
            step=t.progress.step,
            epoch=position.epoch,
            phase=position.stretch.phase,
            images=len(batch) - len(batch.bad),
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
        _note_saved(t, t.saver.poll())


def _backward(t: Training, batch: DeviceBatch, stretch: Stretch) -> torch.Tensor:
    """The batch's gradients and its loss, in as many pieces as memory wants if it may be cut."""
    while t.auto_accumulate:
        accumulate, put_back = _accumulate(t, stretch), remember(t.learner)
        try:
            return t.learner.backward(batch, accumulate)
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
    return t.learner.backward(batch, _accumulate(t, stretch))


def _accumulate(t: Training, stretch: Stretch) -> int:
    return t.progress.accumulate.get(str(stretch.phase), stretch.accumulate)


def _evaluation_due(t: Training) -> bool:
    """At the end of an epoch that the recipe names, or of the run, unless that was done before a restart."""
    step, every = t.progress.step, t.job.recipe.evaluate.every_epochs
    epochs = t.job.timeline.epochs_after(step)
    if not every or not epochs or t.progress.evaluated_step == step:
        return False
    return epochs % every == 0 or step == t.job.timeline.num_steps


def _evaluate(t: Training) -> None:
    """Evaluate, note the result, and save if it is the best so far; does nothing more when asked to stop."""
    job, progress = t.job, t.progress
    t.journal.flush()
    stretch = job.timeline.at(progress.step - 1).stretch
    index = job.phase_data[stretch.phase].val
    assert index is not None
    px = job.recipe.evaluate.px or stretch.px
    started = time.perf_counter()
    views = Views(
        px=px,
        crop_ratio=job.recipe.evaluate.crop_ratio,
        rectangular=stretch.rectangular,
        flip=job.recipe.evaluate.flip,
        rank_batch=max(1, stretch.global_batch // stretch.accumulate),
    )
    networks = Networks(t.learner.networks, partial(autocast, job.recipe.precision, job.device))
    with telling(f"in an evaluation, with {views.rank_batch} images of {px} px at once on {describe(job.device)}"):
        scores = evaluate_split(networks, t.reader, t.feed, index, views, t.stop)
    if scores is None:
        return
    result = scores[""]
    t.clock()
    t.journal.event(
        "evaluated",
        progress.step,
        epoch=job.timeline.epochs_after(progress.step),
        **_named(scores),
        num_images=result.num_images,
        unreadable=[[index.relative_path(sample), reason] for sample, reason in result.unreadable],
        px=px,
        train_loss=t.journal.loss_sum / max(t.journal.images, 1),
        lr=build_schedule(job.recipe, job.timeline)(progress.step - 1),
        seconds=time.perf_counter() - started,
        elapsed_seconds=progress.elapsed_seconds,
    )
    write_summaries(job.run_dir)
    t.journal.reset_loss()
    t.saver.changed = True
    progress.evaluated_step, progress.top1 = progress.step, result.top1
    top1 = scores.get("ema_", result).top1
    if progress.best_top1 is None or top1 > progress.best_top1:
        name = job.run_dir.checkpoint(progress.step, t.attempt).name
        progress.best_top1, progress.best_checkpoint = top1, name if job.recipe.checkpoint.best else None
        if job.recipe.checkpoint.best:
            _save(t)


def _named(scores: Scores) -> dict[str, float]:
    return {
        f"{name}{figure}": getattr(result, figure)
        for name, result in scores.items()
        for figure in ("top1", "top5", "loss")
    }


def _save(t: Training) -> None:
    """Save the state as it is now; the loop is held up for the copy only (and for a save still going on)."""
    _note_saved(t, t.saver.wait())
    t.journal.flush(durable=True)  # what led to a checkpoint is on the disk before it
    t.clock()
    t.progress.epoch_loss_sum, t.progress.epoch_images = t.journal.loss_sum, t.journal.images
    name = t.job.run_dir.checkpoint(t.progress.step, t.attempt).name
    t.saver.save(lambda: checkpoint.take_snapshot(name, t.learner, t.progress))


def _note_saved(t: Training, path: Path | None) -> None:
    if path is not None:
        best = path.name == t.progress.best_checkpoint
        t.journal.event("saved", t.progress.step, checkpoint=path.name, best=best)


def _quarantine(t: Training, batch: Batch) -> None:
    """Note unreadable images, each once, and stop when they are more than the budget."""
    known, phase = t.progress.quarantined, t.job.timeline.at(t.progress.step).stretch.phase
    index = t.job.phase_data[phase].train
    for sample, reason in batch.bad:
        if sample not in known:
            known.append(sample)
            path = index.relative_path(sample)
            t.journal.event("quarantined", t.progress.step, sample=sample, path=path, reason=reason)
    budget = t.job.recipe.data.bad_image_budget
    if len(known) > int(budget * len(index)):
        sample, reason = batch.bad[-1]
        raise UserError(
            f"{len(known)} of {len(index)} training images cannot be read, more than data.bad_image_budget = "
            f"{budget} allows; the last was {index.path(sample)} ({reason}); all are in {t.job.run_dir.events()}"
        )


def _wind_up(t: Training) -> Outcome:
    """After the loop: the last save, and the word why it ended."""
    if t.saver.changed:
        _save(t)
    _note_saved(t, t.saver.wait())
    t.journal.flush(durable=True)
    if t.job.is_finished(t.progress):
        t.journal.event("finished", t.progress.step, elapsed_seconds=t.progress.elapsed_seconds)
        return Outcome(True, t.progress)
    assert t.stop.signal is not None
    why = {"reason": t.stop.reason, "signal": t.stop.signal.name}
    t.journal.event("stopped", t.progress.step, **why)
    write_json(t.job.run_dir.stopped, {**why, "step": t.progress.step, "time": time.time()})
    return Outcome(False, t.progress, t.stop.reason)


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
