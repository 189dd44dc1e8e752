"""A recipe laid out on steps, for a given number of images: which epoch, phase, size and batch a step has.

Pure arithmetic. A step is counted from 0 over the whole run; "after step s" means s steps are done.
"""

from bisect import bisect_right
from dataclasses import dataclass

from fortyfold.spec.errors import UserError
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.world import World


@dataclass(frozen=True)
class Stretch:
    """One phase on the run's steps."""

    phase: int
    first_epoch: int
    num_epochs: int
    first_step: int
    steps_per_epoch: int
    px: int
    global_batch: int
    min_scale: float
    accumulate: int = 1
    lr: float | tuple[float, float] | None = None
    data_copy: int | str | None = None  # as the phase names it
    rectangular: bool = False

    @property
    def num_steps(self) -> int:
        return self.num_epochs * self.steps_per_epoch

    @property
    def end_epoch(self) -> int:
        return self.first_epoch + self.num_epochs


@dataclass(frozen=True)
class Position:
    """Where a step stands."""

    stretch: Stretch
    epoch: int
    step_in_epoch: int

    @property
    def epochs_done(self) -> float:
        """Epochs before this step, with the started one's share."""
        return self.epoch + self.step_in_epoch / self.stretch.steps_per_epoch


@dataclass(frozen=True)
class Timeline:
    stretches: tuple[Stretch, ...]

    @property
    def num_steps(self) -> int:
        return self.stretches[-1].first_step + self.stretches[-1].num_steps

    @property
    def num_epochs(self) -> int:
        return self.stretches[-1].end_epoch

    def at(self, step: int) -> Position:
        """The position of `step`, which must lie in the run."""
        assert 0 <= step < self.num_steps, step
        firsts = [stretch.first_step for stretch in self.stretches]
        stretch = self.stretches[bisect_right(firsts, step) - 1]
        epoch, step_in_epoch = divmod(step - stretch.first_step, stretch.steps_per_epoch)
        return Position(stretch, stretch.first_epoch + epoch, step_in_epoch)

    def epochs_after(self, num_steps: int) -> int | None:
        """How many epochs are done after `num_steps` steps, or None in the middle of one."""
        if num_steps == self.num_steps:
            return self.num_epochs
        position = self.at(num_steps)
        return position.epoch if position.step_in_epoch == 0 else None


def num_batches(num_samples: int, global_batch: int, tail: str) -> int:
    """Batches in an epoch: ⌈n/B⌉, or ⌊n/B⌋ when the tail is dropped."""
    return num_samples // global_batch if tail == "drop" else -(-num_samples // global_batch)


def build_timeline(recipe: Recipe, num_samples: int, world: World) -> Timeline:
    """Lay the recipe's phases one after another for a training set of `num_samples` images."""
    stretches: list[Stretch] = []
    epoch = step = 0
    for number, phase in enumerate(recipe.all_phases()):
        assert phase.px is not None and phase.min_scale is not None
        global_batch = phase.global_batch or (phase.rank_batch or 1) * world.size
        steps = num_batches(num_samples, global_batch, recipe.data.tail)
        if steps == 0:
            raise UserError(
                f"phase {number} has a global batch of {global_batch} but there are only {num_samples} training "
                'images and tail = "drop" leaves none; use a smaller batch, or tail = "keep"'
            )
        length = phase.epochs[1] - phase.epochs[0] if isinstance(phase.epochs, tuple) else phase.epochs
        stretches.append(
            Stretch(
                phase=number,
                first_epoch=epoch,
                num_epochs=length,
                first_step=step,
                steps_per_epoch=steps,
                px=phase.px,
                global_batch=global_batch,
                min_scale=phase.min_scale,
                accumulate=phase.accumulate or 1,
                lr=phase.lr,
                data_copy=phase.data_copy,
                rectangular=bool(phase.rectangular),
            )
        )
        epoch += length
        step += length * steps
    return Timeline(tuple(stretches))
