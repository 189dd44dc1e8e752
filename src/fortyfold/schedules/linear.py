"""A straight line from the end of the warm-up to `final` at the end of the run."""

from fortyfold.spec.recipe import Schedule


def factor(epoch: float, num_epochs: int, schedule: Schedule) -> float:
    done = (epoch - schedule.warmup_epochs) / (num_epochs - schedule.warmup_epochs)
    return 1 + (schedule.final - 1) * done
