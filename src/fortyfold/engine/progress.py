"""How far a run is: the plain part of what a checkpoint holds."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Progress:
    step: int = 0
    """Steps done."""
    evaluated_step: int = 0
    """After how many steps the last whole evaluation was."""
    top1: float | None = None
    """That evaluation's top-1, per cent."""
    best_top1: float | None = None
    best_checkpoint: str | None = None
    """Folder name below checkpoints/ of the best top-1 (the EMA's, where there is one) so far."""
    elapsed_seconds: float = 0.0
    """Wall time from start to here over all attempts, without what was lost by a kill."""
    epoch_loss_sum: float = 0.0
    """Loss summed over the images of the running epoch…"""
    epoch_images: int = 0
    """…and their number."""
    accumulate: dict[str, int] = field(default_factory=dict)
    """Micro-batches a step by phase, where memory made them more than the recipe's."""
    quarantined: list[int] = field(default_factory=list)
    """Sample ids of unreadable training images, in the order they were met."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(state: dict[str, Any]) -> "Progress":
        return Progress(**state)
