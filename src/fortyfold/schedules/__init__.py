"""Learning rate over steps. A schedule is a file here with `factor(epoch, num_epochs, schedule) -> float`.

`epoch` is how many epochs are done (with fractions), `num_epochs` those of the run, `schedule` the
recipe's section; the factor multiplies `optim.lr`. The warm-up and a phase's own line are handled here.
"""

from collections.abc import Callable

from fortyfold.spec import plugin
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.timeline import Position, Timeline


def build_schedule(recipe: Recipe, timeline: Timeline) -> Callable[[int], float]:
    """The learning rate of each step, as a pure function; a misspelt schedule name is an error at once."""
    factor = plugin.load(__name__, recipe.schedule.name).factor

    def learning_rate(step: int) -> float:
        position = timeline.at(step)
        scaled = _batch_scale(recipe, position.stretch.global_batch)
        if position.stretch.lr is not None:
            return scaled * _phase_line(position)
        epoch, warmup = position.epochs_done, recipe.schedule.warmup_epochs
        if epoch < warmup:
            start = recipe.schedule.warmup_start
            return scaled * recipe.optim.lr * (start + (1 - start) * epoch / warmup)
        return scaled * recipe.optim.lr * float(factor(epoch, timeline.num_epochs, recipe.schedule))

    return learning_rate


def _batch_scale(recipe: Recipe, global_batch: int) -> float:
    linear = recipe.optim.lr_scaling == "linear"
    return global_batch / recipe.optim.lr_reference_batch if linear else 1.0


def _phase_line(position: Position) -> float:
    stretch = position.stretch
    if not isinstance(stretch.lr, tuple):
        return stretch.lr or 0.0
    done = (position.epochs_done - stretch.first_epoch) / stretch.num_epochs
    return stretch.lr[0] + (stretch.lr[1] - stretch.lr[0]) * done
