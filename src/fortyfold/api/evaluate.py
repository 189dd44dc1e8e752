"""`fortyfold.evaluate`: scores of a trained run."""

from pathlib import Path
from typing import TYPE_CHECKING

from fortyfold.data.items import DataSet
from fortyfold.engine.evaluate import Evaluation
from fortyfold.engine.scoring import open_scoring

if TYPE_CHECKING:
    import torch


def evaluate(
    run: str | Path,
    *,
    model: "torch.nn.Module | None" = None,
    data: str | Path | DataSet | None = None,
    px: int | None = None,
    best: bool = False,
    flip: bool = False,
) -> dict[str, Evaluation]:
    """Score a run (or one of its checkpoints) on its validation images, or on other `data`; each counts once.

    The key "" has the network's scores on centre crops; "ema_", "flip_", "rect_" "ema_flip_" and "ema_rect_" have
    those of the moving average, with mirror images, and on rectangles, where the run has them or `flip` asks for them.
    A run that was trained with an own `model` needs one like it here; the weights are the run's, `model` is left alone.
    """
    scoring = open_scoring(Path(run), Path(data) if isinstance(data, str) else data, px, best, model)
    return scoring.run(lambda done, total: None, flip)
