"""The recipe: what to train. Frozen, strict, and each field is documented right under it.

Its sections stand here and in spec/images.py, learning.py and strategy.py; all are to be had from here. Only fields
that something reads are in them. `spec/recipe_file.py` makes a Recipe from TOML.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fortyfold.spec.images import Augment, Data, DemoData
from fortyfold.spec.learning import Ema, Loss, Model, Optim, Precision, Schedule
from fortyfold.spec.section import Count, NonNegative, Pixels, Section
from fortyfold.spec.strategy import Strategy

__all__ = [
    "FREE_KEYS", "Augment", "Checkpoint", "Data", "DemoData", "Ema", "Evaluate", "Log", "Loss", "Model", "Optim",
    "Phase", "Precision", "Recipe", "Schedule", "Section", "Strategy",
]  # fmt: skip

LearningRate = float | tuple[float, float]


class Phase(Section):
    epochs: Count | tuple[int, int]
    """How many epochs, or the range [first, end): the phases must follow one another without gaps."""
    px: Pixels | None = None
    """Side of the training images; default: the recipe's."""
    global_batch: Count | None = None
    """Images a step over all ranks; default: the recipe's."""
    rank_batch: Count | None = None
    """Images a step on each rank, instead of global_batch."""
    accumulate: Count | None = None
    """Micro-batches that a rank's share of a step is cut into; default: the recipe's."""
    lr: LearningRate | None = None
    """A learning rate, or a line [from, to] over the phase's steps; wins over the schedule."""
    min_scale: Annotated[float, Field(gt=0, le=1)] | None = None
    """Smallest share of an image's area that a random crop takes; default: the recipe's."""
    data_copy: Count | Literal["original"] | None = None
    """The resized copy to read by its shorter side, or "original"; default: the smallest that suffices."""
    rectangular: bool | None = None
    """Evaluate on rectangles as well; default: the recipe's evaluate.rectangular."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.global_batch is not None and self.rank_batch is not None:
            raise ValueError("global_batch and rank_batch exclude each other; keep one")
        if isinstance(self.epochs, tuple) and not 0 <= self.epochs[0] < self.epochs[1]:
            raise ValueError(f"the range of epochs [{self.epochs[0]}, {self.epochs[1]}) is empty")
        rates = self.lr if isinstance(self.lr, tuple) else (self.lr or 0.0,)
        if min(rates) < 0:
            raise ValueError("lr must not be negative")
        return self


class Evaluate(Section):
    every_epochs: Annotated[int, Field(ge=0)] = 1
    """Evaluate after so many epochs and at the end; 0: never, and no validation images are needed."""
    px: Pixels | None = None
    """Side of the validation images; default: the phase's training size."""
    crop_ratio: Annotated[float, Field(gt=0, le=1)] = 0.875
    """Side of the centre crop as a share of the shorter side (224 of 256: 0.875)."""
    rectangular: bool = False
    """Beside the centre crop, also evaluate in batches of like aspect ratio, each cropped to its own."""
    flip: bool = False
    """Beside the plain result, also that of the mean over each image and its mirror image."""


class Checkpoint(Section):
    every_steps: Annotated[int, Field(ge=0)] = 0
    """Save after so many steps; 0: not for that reason."""
    every_minutes: NonNegative = 10.0
    """Save when so many minutes have passed since the last save; 0: not for that reason."""
    every_epochs: Annotated[int, Field(ge=0)] = 1
    """Save after so many epochs; 0: not for that reason."""
    keep: Count = 2
    """How many of the newest checkpoints to keep."""
    best: bool = True
    """Keep the checkpoint with the best top-1 (the EMA's, where there is one) as well."""


class Log(Section):
    every_steps: Count = 50
    """Without a terminal, print a line after so many steps; sinks get the means of so many."""
    sinks: tuple[str, ...] = ()
    """Where else to report while training: csv, tensorboard, wandb. `fortyfold sink` does it afterwards, too."""
    wandb_project: str | None = None
    """wandb: the project that runs go to; default: that of WANDB_PROJECT or wandb's settings, else fortyfold."""
    wandb_offline: bool = False
    """wandb: write to the run directory only; `wandb sync` sends it later."""


class Recipe(Section):
    name: Annotated[str, Field(pattern=r"^[^/.][^/]*$")] = "unnamed"
    """Names the run's default folder, runs/NAME; default: the recipe file's name."""
    epochs: Count | None = None
    """How often every image is seen; a recipe with phases gives epochs there instead."""
    px: Pixels = 224
    """Side of the training images."""
    global_batch: Count | None = None
    """Images a step, over all ranks."""
    rank_batch: Count | None = None
    """Images a step on each rank, instead of global_batch."""
    accumulate: Count = 1
    """Micro-batches that a rank's share of a step is cut into, one after another, to save memory."""
    min_scale: Annotated[float, Field(gt=0, le=1)] = 0.08
    """Smallest share of an image's area that a random crop takes."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Fixes the first weights, the order of the images and every random choice about them."""
    model: Model
    data: Data
    augment: Augment = Augment()
    optim: Optim
    loss: Loss = Loss()
    precision: Precision = Precision()
    ema: Ema = Ema()
    schedule: Schedule = Schedule()
    strategy: Strategy = Strategy()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    phases: tuple[Phase, ...] = ()
    """Stretches of epochs with their own px, batch and learning rate; none: the whole run is one phase."""

    @model_validator(mode="after")
    def _hangs_together(self) -> Self:
        if self.global_batch is not None and self.rank_batch is not None:
            raise ValueError("global_batch and rank_batch exclude each other; keep one")
        lacks_batch = self.global_batch is None and self.rank_batch is None
        if lacks_batch and not (self.phases and all(p.global_batch or p.rank_batch for p in self.phases)):
            raise ValueError("give global_batch or rank_batch")
        if self.phases and self.epochs is not None:
            raise ValueError("epochs and phases exclude each other; set the epochs of each phase (phases.0.epochs)")
        if not self.phases and self.epochs is None:
            raise ValueError("give epochs, or phases")
        _check_contiguous(self.phases)
        for phase in self.all_phases():
            self.augment.check_batch(phase.global_batch or phase.rank_batch or 1)
        return self

    def all_phases(self) -> tuple[Phase, ...]:
        """The phases, each with px, batch and min_scale filled in; a recipe without phases is one phase."""
        written = self.phases or (Phase(epochs=self.epochs or 1),)
        return tuple(self._filled(phase) for phase in written)

    def _filled(self, phase: Phase) -> Phase:
        own_batch = phase.global_batch or phase.rank_batch
        return phase.model_copy(
            update={
                "px": phase.px or self.px,
                "min_scale": phase.min_scale or self.min_scale,
                "accumulate": phase.accumulate or self.accumulate,
                "rectangular": self.evaluate.rectangular if phase.rectangular is None else phase.rectangular,
                "global_batch": phase.global_batch if own_batch else self.global_batch,
                "rank_batch": phase.rank_batch if own_batch else self.rank_batch,
            }
        )


FREE_KEYS = (
    "name", "data.root", "data.demo", "data.copies", "data.stage", "data.threads", "data.prefetch",
    "data.read_ahead", "checkpoint", "log", "strategy.local_scores", "strategy.deadline_seconds",
)  # fmt: skip
"""Keys (with all below them) that change no weight: a run may go on with other values."""


def _check_contiguous(phases: tuple[Phase, ...]) -> None:
    end = 0
    for number, phase in enumerate(phases):
        first = phase.epochs[0] if isinstance(phase.epochs, tuple) else end
        if first != end:
            raise ValueError(f"phases.{number} starts at epoch {first}, but the one before ends at {end}")
        end = phase.epochs[1] if isinstance(phase.epochs, tuple) else end + phase.epochs
