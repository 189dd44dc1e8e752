"""Half a cosine wave from the end of the warm-up to `final` at the end of the run."""

import math

from fortyfold.spec.recipe import Schedule


def factor(epoch: float, num_epochs: int, schedule: Schedule) -> float:
    done = (epoch - schedule.warmup_epochs) / (num_epochs - schedule.warmup_epochs)
    return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * done)) / 2
