"""What every file in schedules/ must do, and the learning rate of whole recipes."""

import math
from typing import Any

import pytest

from fortyfold.schedules import build_schedule
from fortyfold.spec import plugin
from fortyfold.spec.errors import UserError
from fortyfold.spec.recipe import Recipe, Schedule
from fortyfold.spec.recipe_file import load_recipe
from fortyfold.spec.timeline import build_timeline
from fortyfold.spec.world import World

NAMES = plugin.names("fortyfold.schedules")


def rates(recipe: Recipe, num_samples: int = 64) -> list[float]:
    timeline = build_timeline(recipe, num_samples, World())
    schedule = build_schedule(recipe, timeline)
    return [schedule(step) for step in range(timeline.num_steps)]


def tiny(**changes: Any) -> Recipe:
    """8 steps an epoch."""
    return load_recipe(
        "tiny", {"global_batch": 8, "optim.lr": 1.0, **{k.replace("__", "."): v for k, v in changes.items()}}
    )


@pytest.mark.parametrize("name", NAMES)
def test_it_starts_at_1_stays_within_0_and_1_and_never_rises(name: str) -> None:
    factor = plugin.load("fortyfold.schedules", name).factor
    schedule = Schedule(name=name, warmup_epochs=1.0, step_epochs=3)
    values = [factor(1 + tick / 10, 10, schedule) for tick in range(90)]
    assert values[0] == 1
    assert all(0 <= value <= 1 for value in values)
    assert values == sorted(values, reverse=True)
    assert plugin.load("fortyfold.schedules", name).__doc__


def test_the_four_are_there() -> None:
    assert NAMES == ["constant", "cosine", "linear", "step"]


def test_cosine_and_linear_end_at_final() -> None:
    for name in ("cosine", "linear"):
        values = rates(tiny(schedule__name=name, schedule__final=0.1, schedule__warmup_epochs=0.0, epochs=100))
        assert values[0] == 1
        assert 0.1 < values[-1] < 0.102
    half = rates(tiny(schedule__name="cosine", schedule__warmup_epochs=0.0, epochs=2))[8]
    assert math.isclose(half, 0.5)


def test_step_falls_at_its_epochs() -> None:
    values = rates(tiny(schedule__name="step", schedule__step_epochs=2, schedule__warmup_epochs=0.0, epochs=5))
    assert values == pytest.approx([1.0] * 16 + [0.1] * 16 + [0.01] * 8)


def test_the_warm_up_rises_in_a_line() -> None:
    values = rates(tiny(schedule__name="constant", schedule__warmup_epochs=1.0, schedule__warmup_start=0.2))
    assert values[:9] == pytest.approx([0.2 + 0.1 * step for step in range(9)])
    assert set(values[8:]) == {1.0}


def test_a_phases_own_line_wins_and_scales_with_its_batch() -> None:
    raw = {
        "name": "x", "global_batch": 8, "model": {"name": "m"}, "data": {"root": "x"},
        "optim": {"lr": 9.0, "lr_scaling": "linear", "lr_reference_batch": 16},
        "schedule": {"name": "constant"},
        "phases": [{"epochs": 1, "lr": [0.0, 1.0]}, {"epochs": 1, "lr": 2.0, "global_batch": 32}, {"epochs": 1}],
    }  # fmt: skip
    values = rates(Recipe.model_validate(raw))
    assert values == pytest.approx([0.5 * step / 8 for step in range(8)] + [4.0] * 2 + [4.5] * 8)


def test_a_wrong_name_lists_the_right_ones() -> None:
    with pytest.raises(
        UserError, match="no schedule 'cosin'; there are: constant, cosine, linear, step; did you mean cosine"
    ):
        rates(tiny(schedule__name="cosin"))
