"""From a recipe and a held run directory to the parts that the loop works with."""

import os
import platform
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fortyfold.data.copies import ORIGINAL, choose_copy, copy_sides, open_copy
from fortyfold.data.index import Index, with_classes
from fortyfold.data.reader import Reader
from fortyfold.data.requests import Sampler, require_shards, shape_at
from fortyfold.data.splits import open_split
from fortyfold.data.stage import open_staged
from fortyfold.engine import checkpoint
from fortyfold.engine.agreement import Agreement
from fortyfold.engine.checkpoint import Snapshot
from fortyfold.engine.device import Feeder, choose_device, decoder_name, describe, open_reader
from fortyfold.engine.journal import Journal
from fortyfold.engine.learner import Learner
from fortyfold.engine.learner_state import restore, seed_generators
from fortyfold.engine.precision import try_compiler
from fortyfold.engine.progress import Progress
from fortyfold.engine.saver import Saver
from fortyfold.models.build import build_model, check_fits, name_model, prepare_model
from fortyfold.models.pretrained import load_pretrained
from fortyfold.parallel.accord import Accord
from fortyfold.parallel.post import Post
from fortyfold.parallel.pulse import Pulse
from fortyfold.parallel.ranks import Ranks
from fortyfold.parallel.strategies import require_strategy
from fortyfold.parallel.sync_bn import synchronise
from fortyfold.spec import plugin
from fortyfold.spec.errors import UserError
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag
from fortyfold.spec.timeline import Stretch, Timeline, build_timeline

_STEADY_STEPS = 3


@dataclass(frozen=True)
class PhaseData:
    """What a phase reads."""

    copy: str  # the resized copy's name, or "original"
    train: Index
    val: Index | None  # of the copy that suffices for evaluating


@dataclass(frozen=True)
class Own:
    """What a caller brought along, in place of what the recipe names."""

    model: torch.nn.Module | None = None
    train: Index | None = None
    val: Index | None = None


@dataclass(frozen=True)
class Job:
    """What is to be trained, where, and on what: fixed before anything is built."""

    recipe: Recipe
    timeline: Timeline
    train_index: Index
    val_index: Index | None
    phase_data: tuple[PhaseData, ...]
    run_dir: RunDir
    device: torch.device
    ranks: Ranks
    own_model: torch.nn.Module | None = None

    @property
    def model_name(self) -> str:
        return name_model(self.own_model) if self.own_model is not None else self.recipe.model.name

    @property
    def num_classes(self) -> int:
        return len(self.train_index.classes)

    def is_finished(self, progress: Progress) -> bool:
        evaluated = progress.evaluated_step == progress.step or self.val_index is None
        return progress.step == self.timeline.num_steps and evaluated

    @cached_property
    def sampler(self) -> Sampler:
        data = self.recipe.data
        how = self.recipe.seed, data.tail, data.flip, data.shuffle
        return Sampler(*how, world=self.ranks.world, augment=self.recipe.augment, mean=data.mean)

    def rank_places(self, step: int) -> float:
        """The images of a step over all ranks, divided by the ranks: no whole number where shares differ."""
        position = self.timeline.at(step)
        index = self.phase_data[position.stretch.phase].train
        places = self.sampler.num_places(index, position.step_in_epoch, shape_at(self.timeline, step))
        return places / self.ranks.world.size


@dataclass
class Training:
    """A job under way: the parts that the loop works with."""

    job: Job
    learner: Learner
    reader: Reader
    feed: Feeder
    progress: Progress
    journal: Journal
    saver: Saver
    agreement: Agreement
    attempt: int
    auto_accumulate: bool  # take a step that does not fit into memory again, in smaller pieces
    clock_started: float  # perf_counter at which progress.elapsed_seconds was right
    pulse: Pulse | None = None  # with several ranks
    steady_from: tuple[int, int] = (-1, 0)  # phase, and the step in it from which a rank must not stand still

    @property
    def ranks(self) -> Ranks:
        return self.job.ranks

    def beat(self) -> None:
        """Tell the other ranks that this one gets on; all do at the same points of a step."""
        if self.pulse is not None:
            self.pulse.beat(self.progress.step)

    def begin_step(self) -> None:
        """In the first steps of a phase, which may compile or read a cold disk, a rank may stand still for longer."""
        self.beat()
        if self.pulse is not None:
            phase = self.job.timeline.at(self.progress.step).stretch.phase
            if phase != self.steady_from[0]:
                self.steady_from = phase, self.progress.step + _STEADY_STEPS
            self.pulse.arm(self.progress.step >= self.steady_from[1])

    def excused(self, what: str) -> AbstractContextManager[None]:
        """What is done inside may take long."""
        return self.pulse.excused(what) if self.pulse is not None else nullcontext()

    def clock(self) -> None:
        """Bring the progress' elapsed time up to now."""
        now = time.perf_counter()
        self.progress.elapsed_seconds += now - self.clock_started
        self.clock_started = now


def open_job(
    recipe: Recipe, run_dir: RunDir, staged: Path | None = None, own: Own | None = None, ranks: Ranks | None = None
) -> Job:
    """Read the data's index and lay the recipe out on steps. `staged` is a copy of data.root to read instead."""
    own, ranks = own or Own(), ranks or Ranks()
    require_strategy(recipe.strategy.name)
    plugin.require("fortyfold.topologies", recipe.strategy.topology)
    train, val = _open_data(recipe, staged, own)
    timeline = build_timeline(recipe, len(train), ranks.world)
    _require_a_place_a_rank(timeline, len(train), recipe, ranks.world.size)
    phase_data = tuple(_open_phase(recipe, stretch, train, val) for stretch in timeline.stretches)
    require_shards(recipe.data.shuffle, [data.train for data in phase_data])
    labelled = with_classes(val, train.classes) if val else None
    return Job(recipe, timeline, train, labelled, phase_data, run_dir, choose_device(), ranks, own.model)


def _require_a_place_a_rank(timeline: Timeline, num_images: int, recipe: Recipe, num_ranks: int) -> None:
    for stretch in timeline.stretches:
        smallest = stretch.global_batch if recipe.data.tail == "drop" else num_images // stretch.steps_per_epoch
        if num_ranks > 1 and recipe.strategy.sync_bn and smallest // num_ranks < stretch.accumulate:
            raise UserError(
                f"phase {stretch.phase} cuts shares of {smallest // num_ranks} images into {stretch.accumulate}; "
                "with strategy.sync_bn every rank needs an image in each: use a smaller accumulate, or fewer ranks"
            )
        if smallest < num_ranks:
            raise UserError(
                f"phase {stretch.phase} has batches of {smallest} images (of {num_images} in all), fewer than the "
                f"{num_ranks} ranks; use fewer ranks (--procs), or a larger global_batch"
            )


def _open_data(recipe: Recipe, staged: Path | None, own: Own) -> tuple[Index, Index | None]:
    """The training images and, where the recipe evaluates, those for validation."""
    evaluates = recipe.evaluate.every_epochs > 0
    if own.train is not None:
        if recipe.data.copies is not None:
            raise UserError("data.copies are copies of data.root, not of an own data set; leave them out")
        if recipe.data.stage is not None:
            raise UserError("data.stage copies data.root, not an own data set; leave it out")
        if recipe.data.backend == "dali":
            raise UserError('data.backend = "dali" decodes files, not an own data set\'s items; leave it out')
        if evaluates and own.val is None:
            raise UserError("evaluate.every_epochs wants validation images: give val_data, or set it to 0")
        return own.train, own.val if evaluates else None
    root = Path(recipe.data.root)

    def open_index(split: str) -> Index:
        return open_staged(root, staged, split) if staged else open_split(root, split)

    return open_index("train"), open_index("val") if evaluates else None


def _open_phase(recipe: Recipe, stretch: Stretch, train: Index, val: Index | None) -> PhaseData:
    if recipe.data.copies is None:
        if stretch.data_copy not in (None, ORIGINAL):
            raise UserError(f"phases.{stretch.phase}.data_copy = {stretch.data_copy!r} needs data.copies")
        return PhaseData(ORIGINAL, train, with_classes(val, train.classes) if val else None)
    folder = Path(recipe.data.copies)
    copy = choose_copy(copy_sides(folder), stretch.px, recipe.evaluate.crop_ratio, stretch.data_copy)
    small_train = open_copy(folder, copy, "train", train)
    if val is None:
        return PhaseData(copy, small_train, None)
    small_val = open_eval_copy(recipe, stretch.data_copy, recipe.evaluate.px or stretch.px, val)
    return PhaseData(copy, small_train, with_classes(small_val, train.classes))


def open_eval_copy(recipe: Recipe, named: int | str | None, px: int, val: Index) -> Index:
    """The validation images that suffice for `px`, or those of the copy that was named."""
    if recipe.data.copies is None:
        return val
    folder = Path(recipe.data.copies)
    return open_copy(folder, choose_copy(copy_sides(folder), px, recipe.evaluate.crop_ratio, named), "val", val)


def set_up(
    job: Job, journal: Journal, stop: StopFlag, attempt: int, snapshot: Snapshot | None, auto_accumulate: bool = False
) -> Training:
    """Build everything, with the weights and the progress of `snapshot` if there is one."""
    started = time.perf_counter()
    learner = _build_learner(job, journal, fresh=snapshot is None)
    progress = _go_on(job, journal, learner, snapshot) if snapshot else Progress()
    _forget_lost_best(job, progress)
    if job.recipe.precision.compile:
        _compile(learner, job, journal, progress.step)
    if job.ranks.first:  # the others' is in it
        journal.reset_loss(progress.epoch_loss_sum, progress.epoch_images)
    world = job.ranks.world
    post = Post(world.rank, world.size) if job.ranks.many else None
    saver = Saver(job.run_dir, job.recipe.checkpoint, progress.step, post, far=job.ranks.far)
    folders = [data.train.storage for data in job.phase_data]
    return Training(
        job=job,
        learner=learner,
        reader=open_reader(job.recipe.data, job.device, folders, len(world.node)),
        feed=Feeder(job.device, job.recipe.data, job.recipe.model.channels_last),
        progress=progress,
        journal=journal,
        saver=saver,
        agreement=Agreement(Accord(job.ranks), stop, journal, saver, clock=job.ranks.first),
        attempt=attempt,
        auto_accumulate=auto_accumulate,
        clock_started=started,
    )


def _build_learner(job: Job, journal: Journal, fresh: bool) -> Learner:
    """With first weights if `fresh`; a checkpoint's take their place otherwise."""
    torch.manual_seed(job.recipe.seed)
    spec = job.recipe.model
    own = job.own_model
    model = prepare_model(own, spec) if own is not None else build_model(spec, job.num_classes)
    if fresh and spec.pretrained is not None:
        for note in load_pretrained(model, spec.pretrained):
            journal.event("noted", 0, message=note)
    model = model.to(job.device).train()
    sizes = {stretch.px for stretch in job.timeline.stretches}
    sizes.add(job.recipe.evaluate.px or job.timeline.stretches[-1].px)
    check_fits(model, job.num_classes, sizes, any(stretch.rectangular for stretch in job.timeline.stretches))
    if job.ranks.many and job.recipe.strategy.sync_bn:
        model = synchronise(model, job.device)
    if job.ranks.world.rank:  # rank 0 goes on with the generator that drew the weights, as a single rank does
        seed_generators(job.recipe.seed, job.ranks.world.rank, 0)
    return Learner(model, job.recipe, job.ranks)


def _go_on(job: Job, journal: Journal, learner: Learner, snapshot: Snapshot) -> Progress:
    now = job.ranks.world.size
    if snapshot.num_ranks != now and job.ranks.first:
        what = f"the mean of {snapshot.num_ranks} ranks' weights" if snapshot.replicates else "the same weights"
        message = f"going on with {now} rank{'s' if now > 1 else ''} instead of {snapshot.num_ranks}, from {what}"
        journal.event("noted", snapshot.progress.step, message=message)
    return restore(snapshot, learner, job.recipe.seed)


def _compile(learner: Learner, job: Job, journal: Journal, step: int) -> None:
    problem = try_compiler(job.device)
    if problem is None:
        learner.compile()
    else:
        journal.event("noted", step, message=f"torch.compile does not work here ({problem}); going on without it")


def _forget_lost_best(job: Job, progress: Progress) -> None:
    """After falling back from a damaged checkpoint, the best one may be gone."""
    there = job.ranks.from_first(lambda: checkpoint.names(job.run_dir))  # one look at the disk, for all ranks
    if progress.best_checkpoint and progress.best_checkpoint not in there:
        progress.best_top1 = progress.best_checkpoint = None


def note_start(
    job: Job, journal: Journal, snapshot: Snapshot | None, passed_over: dict[str, str], spec: dict[str, Any]
) -> None:
    """Say in the events what begins, from where, and by what versions and command."""
    step = snapshot.progress.step if snapshot else 0
    journal.event(
        "started",
        step,
        num_steps=job.timeline.num_steps,
        num_epochs=job.timeline.num_epochs,
        train_images=len(job.train_index),
        val_images=len(job.val_index) if job.val_index else 0,
        classes=job.num_classes,
        model=job.model_name,
        device=describe(job.device),
        ranks=job.ranks.world.size,
        decoder=decoder_name(job.recipe.data, job.device),
        host=platform.node(),
        process=os.getpid(),
        **{key: spec[key] for key in ("versions", "git_commit", "command")},
    )
    if job.ranks.first and (snapshot is not None or passed_over):
        journal.event("resumed", step, checkpoint=snapshot and snapshot.name, passed_over=passed_over)
