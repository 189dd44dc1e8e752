"""`fortyfold evaluate`"""

from pathlib import Path
from typing import Annotated

import typer

from fortyfold.cli.bars import bar
from fortyfold.cli.openmp import calm_openmp

SHOWN = 5  # unreadable images named on the terminal


def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or one checkpoint of it.")],
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Other data: with val/, or class folders.")] = None,
    px: Annotated[int | None, typer.Option(min=8, max=4096, help="Side of the images; default: the recipe's.")] = None,
    flip: Annotated[bool, typer.Option("--flip", help="Also the mean over each image and its mirror image.")] = False,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint, not the newest.")] = False,
) -> None:
    """Evaluate a trained model, each image counted exactly once."""
    calm_openmp()
    from fortyfold.cli.display import NAMED
    from fortyfold.engine.scoring import open_scoring

    scoring = open_scoring(target, data, px, best)
    print(f"evaluating {scoring.checkpoint} on {scoring.index.folder} at {scoring.px} px", flush=True)
    with bar("evaluating") as report:
        scores = scoring.run(report, flip)
    result = scores[""]
    for sample, reason in result.unreadable[:SHOWN]:
        print(f"unreadable: {scoring.index.relative_path(sample)}: {reason}")
    if len(result.unreadable) > SHOWN:
        print(f"unreadable: {len(result.unreadable) - SHOWN} more")
    for name, score in scores.items():
        print(f"{NAMED[name] + ': ' if name else ''}{score}  top-5 {score.top5:.1f} %  loss {score.loss:.4f}")
