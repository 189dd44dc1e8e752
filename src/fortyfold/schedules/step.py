"""Multiplied by `step_factor` every `step_epochs` epochs, counted from the start of the run."""

from fortyfold.spec.recipe import Schedule


def factor(epoch: float, num_epochs: int, schedule: Schedule) -> float:
    return schedule.step_factor ** int(epoch // schedule.step_epochs)
