"""A power of what is left, from the end of the warm-up to `final` at the end of the run."""

from fortyfold.spec.recipe import Schedule


def factor(epoch: float, num_epochs: int, schedule: Schedule) -> float:
    left = (num_epochs - epoch) / (num_epochs - schedule.warmup_epochs)
    return float(schedule.final + (1 - schedule.final) * left**schedule.power)
