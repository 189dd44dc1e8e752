import pytest
from hypothesis import given
from hypothesis import strategies as st

from fortyfold.spec.errors import UserError
from fortyfold.spec.recipe import Data, Model, Optim, Phase, Recipe
from fortyfold.spec.timeline import build_timeline
from fortyfold.spec.world import World


def recipe_with(phases: list[Phase], tail: str = "keep") -> Recipe:
    data = Data(root="x", tail=tail)
    return Recipe(model=Model(name="m"), data=data, optim=Optim(lr=0.1), global_batch=8, phases=tuple(phases))


phases = st.lists(
    st.builds(Phase, epochs=st.integers(1, 4), global_batch=st.integers(1, 40), px=st.integers(8, 64)),
    min_size=1,
    max_size=4,
)


@given(phases, st.integers(1, 100))
def test_steps_run_through_epochs_and_phases_in_order(phases: list[Phase], num_samples: int) -> None:
    timeline = build_timeline(recipe_with(phases), num_samples, World())
    positions = [timeline.at(step) for step in range(timeline.num_steps)]
    assert [(p.epoch, p.step_in_epoch) for p in positions] == sorted((p.epoch, p.step_in_epoch) for p in positions)
    assert {p.epoch for p in positions} == set(range(timeline.num_epochs))
    for step, position in enumerate(positions):
        assert position.stretch.global_batch == phases[position.stretch.phase].global_batch
        ends = timeline.epochs_after(step + 1)
        last_of_epoch = position.step_in_epoch == position.stretch.steps_per_epoch - 1
        assert ends == (position.epoch + 1 if last_of_epoch else None)


def test_rank_batch_counts_every_rank() -> None:
    recipe = recipe_with([Phase(epochs=1, rank_batch=4)])
    assert build_timeline(recipe, 100, World(size=3)).stretches[0].global_batch == 12


def test_dropping_the_tail_of_too_few_images_is_an_error() -> None:
    with pytest.raises(UserError, match="only 5 training images"):
        build_timeline(recipe_with([Phase(epochs=1)], tail="drop"), 5, World())
