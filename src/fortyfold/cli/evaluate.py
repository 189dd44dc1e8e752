"""`fortyfold evaluate`"""

import json
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fortyfold.cli.bars import bar
from fortyfold.cli.openmp import calm_openmp
from fortyfold.cli.options import ProcsOption, choose_procs
from fortyfold.spec.run_dir import RunDir

if TYPE_CHECKING:
    from fortyfold.engine.evaluate import Scores

SHOWN = 5  # unreadable images named on the terminal
DEADLINE_SECONDS = 300.0


def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or one checkpoint of it.")],
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Other data: with val/, or class folders.")] = None,
    px: Annotated[int | None, typer.Option(min=8, max=4096, help="Side of the images; default: the recipe's.")] = None,
    flip: Annotated[bool, typer.Option("--flip", help="Also the mean over each image and its mirror image.")] = False,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint, not the newest.")] = False,
    procs: ProcsOption = None,
) -> None:
    """Evaluate a trained model on every GPU of this machine, each image counted exactly once."""
    num_ranks = choose_procs(procs)
    if num_ranks > 1:
        found = _evaluate_together(target, data, px, flip, best, num_ranks)
    else:
        found = _evaluate_here(target, data, px, flip, best)
    _tell(found)


@dataclass(frozen=True)
class _Found:
    scores: "Scores"
    names: dict[int, str]
    """Of unreadable images."""


def _evaluate_here(target: Path, data: Path | None, px: int | None, flip: bool, best: bool) -> _Found:
    calm_openmp()
    from fortyfold.engine.scoring import open_scoring

    scoring = open_scoring(target, data, px, best)
    print(f"evaluating {scoring.checkpoint} on {scoring.index.folder} at {scoring.px} px", flush=True)
    with bar("evaluating") as report:
        scores = scoring.run(report, flip)
    return _Found(scores, {sample: scoring.index.relative_path(sample) for sample, _ in scores[""].unreadable})


def _evaluate_together(
    target: Path, data: Path | None, px: int | None, flip: bool, best: bool, num_ranks: int
) -> _Found:
    """On several ranks, each in a process of its own, which leave the scores in a folder for the time being."""
    from fortyfold.engine.evaluate import Evaluation
    from fortyfold.launch.local import run_once

    with tempfile.TemporaryDirectory(prefix="fortyfold-evaluate-") as name, bar("evaluating") as report:
        folder = RunDir(Path(name))
        job = {"verb": "evaluate", "run": name, "deadline_seconds": DEADLINE_SECONDS, "px": px, "flip": flip}
        job |= {"best": best, "target": str(target.absolute()), "data": str(data.absolute()) if data else None}

        def attend() -> None:
            with suppress(OSError, ValueError):
                report(*json.loads(folder.scores_progress.read_text(encoding="utf-8")))

        run_once(job, num_ranks, attend)
        found: dict[str, Any] = json.loads(folder.scores.read_text(encoding="utf-8"))
    print(f"evaluated {found['checkpoint']} on {found['folder']} at {found['px']} px, on {num_ranks} ranks")
    scores = {name: Evaluation(**score) for name, score in found["scores"].items()}
    return _Found(scores, {int(sample): name for sample, name in found["names"].items()})


def _tell(found: _Found) -> None:
    from fortyfold.cli.display import NAMED

    unreadable = found.scores[""].unreadable
    for sample, reason in unreadable[:SHOWN]:
        print(f"unreadable: {found.names[sample]}: {reason}")
    if len(unreadable) > SHOWN:
        print(f"unreadable: {len(unreadable) - SHOWN} more")
    for name, score in found.scores.items():
        print(f"{NAMED[name] + ': ' if name else ''}{score}  top-5 {score.top5:.1f} %  loss {score.loss:.4f}")
