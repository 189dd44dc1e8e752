"""`fortyfold evaluate`"""

from pathlib import Path
from typing import Annotated

import typer

from fortyfold.cli.bars import bar
from fortyfold.cli.openmp import calm_openmp

NAMED = 5  # unreadable images named on the terminal


def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or one checkpoint of it.")],
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Other data: with val/, or class folders.")] = None,
    px: Annotated[int | None, typer.Option(min=8, max=4096, help="Side of the images; default: the recipe's.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint, not the newest.")] = False,
) -> None:
    """Evaluate a trained model, each image counted exactly once."""
    calm_openmp()
    from fortyfold.engine.scoring import open_scoring

    scoring = open_scoring(target, data, px, best)
    print(f"evaluating {scoring.checkpoint} on {scoring.index.folder} at {scoring.px} px", flush=True)
    with bar("evaluating") as report:
        scores = scoring.run(report)
    result = scores.centre
    for sample, reason in result.unreadable[:NAMED]:
        print(f"unreadable: {scoring.index.relative_path(sample)}: {reason}")
    if len(result.unreadable) > NAMED:
        print(f"unreadable: {len(result.unreadable) - NAMED} more")
    print(f"{result}  top-5 {result.top5:.1f} %  loss {result.loss:.4f}")
    if (other := scores.rectangle) is not None:
        print(f"rectangular: {other}  top-5 {other.top5:.1f} %  loss {other.loss:.4f}")
