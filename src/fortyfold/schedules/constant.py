"""The learning rate stays as it is."""

from fortyfold.spec.recipe import Schedule


def factor(epoch: float, num_epochs: int, schedule: Schedule) -> float:
    return 1.0
