"""What every file in schedules/ must do, and the learning rate of whole recipes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, PolynomialLR

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
def test_it_stays_within_0_and_1_and_never_rises_once_it_was_at_1(name: str) -> None:
    factor = plugin.load("fortyfold.schedules", name).factor
    warmup = 0.0 if name == "one_cycle" else 1.0
    schedule = Schedule(name=name, warmup_epochs=warmup, **({"step_epochs": 3} if name == "step" else {}))
    values = [factor(warmup + tick / 10, 10, schedule) for tick in range(90)]
    top = values.index(1)
    assert top == (30 if name == "one_cycle" else 0)  # the others rise in the warm-up
    assert values[:top] == sorted(values[:top])
    assert values[top:] == sorted(values[top:], reverse=True)
    assert all(0 <= value <= 1 for value in values)
    assert plugin.load("fortyfold.schedules", name).__doc__


def test_the_six_are_there_and_the_recipe_names_them() -> None:
    assert NAMES == ["constant", "cosine", "linear", "one_cycle", "polynomial", "step"]
    text = Schedule.model_fields["name"].description
    assert text and all(name in text for name in NAMES)


def torch_rates(make: Callable[[torch.optim.Optimizer], LRScheduler], num_steps: int) -> list[float]:
    """What torch's own schedule gives for a learning rate of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer)
    values = []
    for _ in range(num_steps):
        values.append(float(schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    return values


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.0])
def test_polynomial_is_torchs(power: float) -> None:
    ours = rates(tiny(schedule__name="polynomial", schedule__power=power, schedule__warmup_epochs=0.0, epochs=5))
    assert ours == pytest.approx(torch_rates(lambda o: PolynomialLR(o, total_iters=40, power=power), 40), abs=1e-12)


@pytest.mark.parametrize(("peak", "start", "final"), [(0.25, 0.04, 1e-4), (0.3, 0.01, 0.01), (0.9, 0.5, 0.001)])
def test_one_cycle_is_torchs(peak: float, start: float, final: float) -> None:
    """torch counts both ends of the curve as steps; here, as in every schedule, the end comes after the last one."""
    n = 80
    section = Schedule(name="one_cycle", peak=peak, warmup_start=start, final=final)
    ours = rates(tiny(schedule=section.model_dump(), epochs=10))

    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return OneCycleLR(
            optimizer, max_lr=1.0, total_steps=n + 1, pct_start=(peak * n + 1) / (n + 1), cycle_momentum=False,
            div_factor=1 / start, final_div_factor=start / final,
        )  # fmt: skip

    assert len(ours) == n
    assert ours == pytest.approx(torch_rates(make, n), abs=1e-12)


def test_one_cycle_takes_no_warm_up() -> None:
    with pytest.raises(UserError, match=r"schedule: one_cycle has a rise of its own.*; set warmup_epochs to 0"):
        tiny(schedule__name="one_cycle", schedule__warmup_epochs=0.5)


@pytest.mark.parametrize("name", ["cosine", "linear", "one_cycle", "polynomial"])
def test_it_ends_at_final(name: str) -> None:
    values = rates(tiny(schedule__name=name, schedule__final=0.1, schedule__warmup_epochs=0.0, epochs=100))
    assert 0.1 < values[-1] < 0.102


def test_a_cosine_is_half_way_down_in_the_middle() -> None:
    assert math.isclose(rates(tiny(schedule__name="cosine", schedule__warmup_epochs=0.0, epochs=2))[8], 0.5)


def test_step_falls_at_its_epochs() -> None:
    values = rates(tiny(schedule__name="step", schedule__step_epochs=2, schedule__warmup_epochs=0.0, epochs=5))
    assert values == pytest.approx([1.0] * 16 + [0.1] * 16 + [0.01] * 8)


def test_the_warm_up_rises_in_a_line() -> None:
    values = rates(tiny(schedule__name="constant", schedule__warmup_epochs=1.0, schedule__warmup_start=0.2))
    assert values[:9] == pytest.approx([0.2 + 0.1 * step for step in range(9)])
    assert set(values[8:]) == {1.0}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "one_cycle"])
def test_the_warm_up_ends_at_1(name: str) -> None:
    values = rates(tiny(schedule__name=name, schedule__warmup_epochs=1.5, schedule__final=0.3))
    assert values[12] == 1 and max(values[:12]) < 1


def test_a_phases_own_line_wins_and_scales_with_its_batch() -> None:
    raw = {
        "name": "x", "global_batch": 8, "model": {"name": "m"}, "data": {"root": "x"},
        "optim": {"lr": 9.0, "lr_scaling": "linear", "lr_reference_batch": 16},
        "schedule": {"name": "constant"},
        "phases": [{"epochs": 1, "lr": [0.0, 1.0]}, {"epochs": 1, "lr": 2.0, "global_batch": 32}, {"epochs": 1}],
    }  # fmt: skip
    values = rates(Recipe.model_validate(raw))
    assert values == pytest.approx([0.5 * step / 8 for step in range(8)] + [4.0] * 2 + [4.5] * 8)


def phased(phases: list[dict[str, Any]], **schedule: Any) -> Recipe:
    return tiny(epochs=None, phases=phases, schedule=Schedule(**schedule).model_dump())


def test_a_schedule_goes_on_under_a_phases_own_line() -> None:
    """Where the phase ends, the cosine is where it would have been without it."""
    plain = rates(phased([{"epochs": 6}], name="cosine"))
    values = rates(phased([{"epochs": 2}, {"epochs": 2, "lr": [5.0, 7.0]}, {"epochs": 2}], name="cosine"))
    assert values[:16] == plain[:16] and values[32:] == plain[32:]
    assert values[16:32] == pytest.approx([5.0 + 2.0 * step / 16 for step in range(16)])


def test_a_schedule_counts_epochs_whatever_their_steps() -> None:
    """A phase with twice the batch has half the steps, on the same curve."""
    values = rates(phased([{"epochs": 2}, {"epochs": 2, "global_batch": 16}], name="linear"))
    assert values == pytest.approx([1 - step / 32 for step in [*range(16), *range(16, 32, 2)]])


@pytest.mark.parametrize("name", NAMES)
def test_neither_a_restart_nor_micro_batches_change_it(name: str) -> None:
    recipe = phased([{"epochs": 2}, {"epochs": 1, "accumulate": 4, "px": 64}], name=name)
    timeline = build_timeline(recipe, 64, World())
    resumed = build_schedule(recipe, timeline)
    backwards = [resumed(step) for step in reversed(range(timeline.num_steps))]
    assert backwards[::-1] == rates(phased([{"epochs": 3}], name=name))


def test_a_wrong_name_lists_the_right_ones() -> None:
    with pytest.raises(
        UserError,
        match="no schedule 'cosin'; there are: constant, cosine, linear, one_cycle, polynomial, step; did you mean",
    ):
        rates(tiny(schedule__name="cosin"))
