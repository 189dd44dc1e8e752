"""Half a cosine wave up from `warmup_start` to 1 at `peak` of the run, another down to `final` at its end.

The curve of torch's OneCycleLR; the momentum stays as it is.
"""

import math

from fortyfold.spec.recipe import Schedule


def factor(epoch: float, num_epochs: int, schedule: Schedule) -> float:
    done = epoch / num_epochs
    if done < schedule.peak:
        return _half_wave(schedule.warmup_start, 1.0, done / schedule.peak)
    return _half_wave(1.0, schedule.final, (done - schedule.peak) / (1 - schedule.peak))


def _half_wave(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2
