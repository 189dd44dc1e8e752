"""What happens between two steps: evaluating, saving, and leaving out images that cannot be read."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fortyfold.data.index import Index
from fortyfold.data.reader import Batch
from fortyfold.data.requests import shape_at
from fortyfold.engine.device import describe
from fortyfold.engine.evaluate import Company, Networks, Scores, Views, evaluate_split
from fortyfold.engine.learner_state import take_snapshot
from fortyfold.engine.memory import telling
from fortyfold.engine.precision import autocast
from fortyfold.engine.setup import Training
from fortyfold.engine.statistics import reestimate
from fortyfold.metrics.summary import write_summaries
from fortyfold.parallel.average import averaged, distance
from fortyfold.parallel.ranks import Ranks
from fortyfold.schedules import build_schedule
from fortyfold.spec.errors import UserError


def evaluation_due(t: Training) -> bool:
    """At the end of an epoch that the recipe names, or of the run, unless that was done before a restart."""
    step, every = t.progress.step, t.job.recipe.evaluate.every_epochs
    epochs = t.job.timeline.epochs_after(step)
    if not every or not epochs or t.progress.evaluated_step == step:
        return False
    return epochs % every == 0 or step == t.job.timeline.num_steps


def evaluate_now(t: Training) -> None:
    """Evaluate, note the result, and save if it is the best so far; does nothing more when asked to stop."""
    job, progress = t.job, t.progress
    t.journal.flush()
    stretch = job.timeline.at(progress.step - 1).stretch
    index = job.phase_data[stretch.phase].val
    assert index is not None
    started = time.perf_counter()
    with t.excused("evaluating"):
        scores, beside = _scores(t, index)
    if scores is None:
        return
    result = scores[""]
    loss_sum, images = _loss_everywhere(t)
    t.clock()
    if t.ranks.first:
        t.journal.event(
            "evaluated",
            progress.step,
            epoch=job.timeline.epochs_after(progress.step),
            **_named(scores),
            **beside,
            num_images=result.num_images,
            unreadable=[[index.relative_path(sample), reason] for sample, reason in result.unreadable],
            px=job.recipe.evaluate.px or stretch.px,
            train_loss=loss_sum / max(images, 1),
            lr=build_schedule(job.recipe, job.timeline)(progress.step - 1),
            seconds=time.perf_counter() - started,
            elapsed_seconds=progress.elapsed_seconds,
        )
        write_summaries(job.run_dir)
    t.journal.reset_loss()
    t.saver.changed = True
    progress.evaluated_step, progress.top1 = progress.step, result.top1
    _keep_best(t, scores.get("ema_", result).top1)


def _keep_best(t: Training, top1: float) -> None:
    progress, keeps = t.progress, t.job.recipe.checkpoint.best
    if progress.best_top1 is None or top1 > progress.best_top1:
        name = t.job.run_dir.checkpoint(progress.step, t.attempt).name
        progress.best_top1, progress.best_checkpoint = top1, name if keeps else None
        if keeps:
            save_now(t)


def _scores(t: Training, index: Index) -> tuple[Scores | None, dict[str, Any]]:
    """Those of the network that all ranks agree on, and what else is of interest; None when asked to stop."""
    job, strategy = t.job, t.job.recipe.strategy
    stretch = job.timeline.at(t.progress.step - 1).stretch
    views = Views(
        px=job.recipe.evaluate.px or stretch.px,
        crop_ratio=job.recipe.evaluate.crop_ratio,
        rectangular=stretch.rectangular,
        flip=job.recipe.evaluate.flip,
        rank_batch=max(1, stretch.global_batch // t.ranks.world.size // stretch.accumulate),
        global_batch=max(1, stretch.global_batch // stretch.accumulate),
    )
    precise = partial(autocast, job.recipe.precision, job.device)

    def stops() -> bool:
        t.beat()
        return t.agreement.stops()

    what = f"in an evaluation, with {views.rank_batch} images of {views.px} px at once on {describe(job.device)}"
    with telling(what):
        t.agreement.change_pace()
        beside: dict[str, Any] = {}
        if t.learner.strategy.replicates:
            t.learner.strategy.settle()
            beside["consensus_distance"] = distance(t.learner.model, t.ranks)
        if t.learner.strategy.replicates and strategy.local_scores:
            alone = Company(Ranks(), stops)  # each its own network, on all images
            own = evaluate_split(Networks({"": t.learner.model}, precise), t.reader, t.feed, index, views, alone)
            if own is None:
                return None, {}
            beside["local_top1"] = t.ranks.gather(own[""].top1)
        with as_evaluated(t):
            together = Company(t.ranks, stops)
            networks = Networks(t.learner.networks, precise)
            scores = evaluate_split(networks, t.reader, t.feed, index, views, together)
        t.agreement.change_pace()
    return scores, beside


@contextmanager
def as_evaluated(t: Training) -> Iterator[None]:
    """Inside, the networks are what all ranks agree on; afterwards as they were."""
    learner, spec = t.learner, t.job.recipe.strategy
    networks = list(learner.networks.values())
    learner.strategy.settle()
    with averaged(networks, t.ranks, parameters=learner.strategy.replicates):
        if t.ranks.many and spec.bn == "reestimate":
            last = max(t.progress.step - 1, 0)
            position, shape = t.job.timeline.at(last), shape_at(t.job.timeline, last)
            index = t.job.phase_data[position.stretch.phase].train
            numbers = range(min(spec.bn_batches, shape.num_batches))
            requests = (t.job.sampler.request(index, position.epoch, number, shape) for number in numbers)
            precise = partial(autocast, t.job.recipe.precision, t.job.device)
            with closing(t.reader.stream(requests)) as batches:
                reestimate(networks, batches, t.feed, t.ranks, precise)
        yield


def _named(scores: Scores) -> dict[str, float]:
    return {
        f"{name}{figure}": getattr(result, figure)
        for name, result in scores.items()
        for figure in ("top1", "top5", "loss")
    }


def save_now(t: Training) -> None:
    """Save the state as it is now; the loop is held up for the copy only (and for a save still going on)."""
    with t.excused("saving"):
        note_saved(t, t.saver.wait())
        t.journal.flush(durable=True)  # what led to a checkpoint is on the disk before it
        t.agreement.require_finite()
        t.clock()
        t.progress.epoch_loss_sum, t.progress.epoch_images = _loss_everywhere(t)
        _share_quarantine(t)
        name = t.job.run_dir.checkpoint(t.progress.step, t.attempt).name
        t.saver.save(lambda: take_snapshot(name, t.learner, t.progress, partial(as_evaluated, t)))


def note_saved(t: Training, path: Path | None) -> None:
    if path is not None and t.ranks.first:
        best = path.name == t.progress.best_checkpoint
        t.journal.event("saved", t.progress.step, checkpoint=path.name, best=best)


def quarantine(t: Training, batch: Batch) -> None:
    """Note unreadable images, each once, and stop when they are more than the budget."""
    known, phase = t.progress.quarantined, t.job.timeline.at(t.progress.step).stretch.phase
    index = t.job.phase_data[phase].train
    for sample, reason in batch.bad:
        if sample not in known:
            known.append(sample)
            path = index.relative_path(sample)
            t.journal.event("quarantined", t.progress.step, sample=sample, path=path, reason=reason)
    _require_budget(t, index)


def _share_quarantine(t: Training) -> None:
    """Every rank has met some of the unreadable images; together they may be more than the budget."""
    if t.ranks.many:
        everywhere = [sample for known in t.ranks.gather(t.progress.quarantined) for sample in known]
        t.progress.quarantined[:] = dict.fromkeys(everywhere)
        _require_budget(t, t.job.train_index)


def _require_budget(t: Training, index: Index) -> None:
    known, budget = t.progress.quarantined, t.job.recipe.data.bad_image_budget
    if len(known) > int(budget * len(index)):
        raise UserError(
            f"{len(known)} of {len(index)} training images cannot be read, more than data.bad_image_budget = "
            f"{budget} allows; the last was {index.path(known[-1])}; all are in {t.job.run_dir.events()}"
        )


def _loss_everywhere(t: Training) -> tuple[float, int]:
    """Summed over the images since the last evaluation, and their number, over all ranks."""
    everywhere = t.ranks.gather([t.journal.loss_sum, t.journal.images])
    return sum(loss for loss, _ in everywhere), sum(images for _, images in everywhere)
