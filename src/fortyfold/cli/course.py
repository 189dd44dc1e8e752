"""The course of a recipe: learning rate, image size and batch over its epochs, as numbers to draw. No torch.

Pure arithmetic on the recipe and a number of training images; `course_text.py` and `course_png.py` draw it.
"""

from dataclasses import dataclass
from itertools import count, groupby

from fortyfold.schedules import build_schedule
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.timeline import Stretch, build_timeline
from fortyfold.spec.world import World

IMAGENET_IMAGES = 1_281_167
_STEPS_SHOWN = 2000  # of a whole run: more than any drawing has columns
_VALUES_NAMED = 8


@dataclass(frozen=True)
class Series:
    """One quantity at the epochs of its course."""

    name: str
    values: tuple[float, ...]

    @property
    def highest(self) -> float:
        return max(self.values)

    def in_words(self) -> str:
        """Its values one after another; of many, the first, the highest and the last."""
        changes = _without_repeats(self.values)
        if len(changes) > _VALUES_NAMED:
            changes = _without_repeats((self.values[0], self.highest, self.values[-1]))
        return f"{self.name}: {' to '.join(map(number, changes))}"


@dataclass(frozen=True)
class Course:
    title: str
    num_epochs: int
    borders: tuple[int, ...]
    """Epochs at which another phase starts."""
    epochs: tuple[float, ...]
    """Where the series were taken: epochs done before a step; the first and last step of each phase among them."""
    series: tuple[Series, Series, Series]
    """Learning rate, px, global batch."""


def lay_course(recipe: Recipe, num_images: int) -> Course:
    """Lay `recipe` out for `num_images` training images, on one rank."""
    timeline = build_timeline(recipe, num_images, World())
    learning_rate = build_schedule(recipe, timeline)
    stride = max(1, timeline.num_steps // _STEPS_SHOWN)
    steps = [step for stretch in timeline.stretches for step in _some_steps(stretch, stride)]
    positions = [timeline.at(step) for step in steps]
    stretches = [position.stretch for position in positions]
    return Course(
        title=f"{recipe.name}: {timeline.num_epochs:,} epochs of {num_images:,} images, {timeline.num_steps:,} steps",
        num_epochs=timeline.num_epochs,
        borders=tuple(stretch.first_epoch for stretch in timeline.stretches[1:]),
        epochs=tuple(position.epochs_done for position in positions),
        series=(
            Series("learning rate", tuple(learning_rate(step) for step in steps)),
            Series("px", tuple(stretch.px for stretch in stretches)),
            Series(_batch_name(recipe), tuple(stretch.global_batch for stretch in stretches)),
        ),
    )


def default_images(recipe: Recipe) -> int:
    """How many training images a recipe has when nobody says: the demo's, or ImageNet's."""
    from fortyfold.data.demo import DemoSpec

    demo = recipe.data.demo
    if demo is None:
        return IMAGENET_IMAGES
    return DemoSpec(demo.classes, demo.images, demo.px, demo.px, demo.seed).splits()["train"]


def number(value: float) -> str:
    """For people: a whole number as such, another with three digits."""
    return f"{value:,.0f}" if value == round(value) else f"{value:.3g}"


def tick_epochs(num_epochs: int, most: int) -> list[int]:
    """Round epochs for an axis, at most `most` and the end itself."""
    spacings = (digit * 10**zeros for zeros in count() for digit in (1, 2, 5))
    spacing = next(spacing for spacing in spacings if num_epochs <= spacing * most)
    return [epoch for epoch in range(0, num_epochs, spacing) if num_epochs - epoch > spacing * 2 / 3] + [num_epochs]


def _without_repeats(values: tuple[float, ...]) -> list[float]:
    return [value for value, _ in groupby(values)]


def _some_steps(stretch: Stretch, stride: int) -> list[int]:
    """Every `stride`-th step of a phase, and its last."""
    end = stretch.first_step + stretch.num_steps
    return sorted({*range(stretch.first_step, end, stride), end - 1})


def _batch_name(recipe: Recipe) -> str:
    by_rank = any(phase.rank_batch is not None for phase in recipe.all_phases())
    return "global batch on one rank (rank_batch)" if by_rank else "global batch"
