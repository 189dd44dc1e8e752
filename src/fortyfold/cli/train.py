"""`fortyfold train`"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fortyfold.cli.openmp import calm_openmp
from fortyfold.cli.options import ProcsOption, RecipeArgument, SetOption, choose_procs, resolve
from fortyfold.cli.train_on import Wishes, train_on
from fortyfold.spec.errors import UserError
from fortyfold.spec.exit_codes import STOPPED
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.run_dir import MODEL, RunDir
from fortyfold.spec.site_file import load_site

if TYPE_CHECKING:
    from collections.abc import Callable

    from fortyfold.data.stage import Staged
    from fortyfold.spec.events import Event
    from fortyfold.spec.stop import StopFlag


def train(
    recipe: RecipeArgument,
    data: Annotated[str | None, typer.Option(metavar="DIR", help="Folder with train/ and val/ (data.root).")] = None,
    model: Annotated[str | None, typer.Option(help="A timm model (model.name).")] = None,
    epochs: Annotated[int | None, typer.Option(help="How many epochs.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate (optim.lr).")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Run directory; default: runs/RECIPE.")] = None,
    set_: SetOption = None,
    procs: ProcsOption = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="SITE", help="Where: a site of sites.toml (see fortyfold sites); default: here."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="With --on: machines; default: the site's.")] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", help="With --on: in the foreground, in an allocation asked for now.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="With --on: follow the run; Ctrl-C leaves it running.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --on: print scripts and commands, and do nothing.")
    ] = False,
    auto_accumulate: Annotated[
        bool, typer.Option("--auto-accumulate", help="Out of memory: halve the micro-batch, keep the global batch.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew; a run that is there is moved aside.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="With a site that costs money (aws): do not ask before it does.")
    ] = False,
) -> int:
    """Train a recipe, on every GPU of this machine or, with --on, elsewhere.

    The same command goes on after a stop or a kill.
    Exit codes: 0 trained, 75 stopped unfinished (saved), 2 bad input, 1 failure.
    """
    chosen = resolve(recipe, set_, {"data.root": data, "model.name": model, "epochs": epochs, "optim.lr": lr})
    site = load_site("local" if on is None else on)
    if site.kind != "local":
        if auto_accumulate:
            raise UserError("--auto-accumulate is for one process on this machine; set accumulate instead")
        return train_on(chosen, Wishes(str(on), site, nodes, procs, out, interactive, dry_run, watch, fresh, yes))
    if (nodes or 1) > 1 or interactive or watch or dry_run:
        raise UserError("--nodes, --interactive, --watch and --dry-run are for a site other than this machine (--on)")
    return _train_on_this_machine(chosen, procs or site.procs, out, fresh, auto_accumulate)


def _train_on_this_machine(
    recipe: Recipe, procs: int | None, out: Path | None, fresh: bool, auto_accumulate: bool
) -> int:
    """Prepare the data, train in this process or in several, and tell how it ended; gives the exit code."""
    from fortyfold.data import decode
    from fortyfold.sinks import require_sinks
    from fortyfold.spec.stop import StopFlag

    stop = StopFlag().listen()  # before anything takes long
    require_sinks(recipe.log.sinks)
    num_ranks = choose_procs(procs)
    if auto_accumulate and num_ranks > 1:
        raise UserError(f"--auto-accumulate is for one process, and here are {num_ranks}; set accumulate instead")
    run_dir = RunDir(out or Path("runs") / recipe.name)
    try:
        staged = _prepare_data(recipe, stop)
    except _Stop:
        print("stopped before training began; the same command goes on")
        return STOPPED
    if fresh and (aside := run_dir.set_aside()):
        print(f"the run that was here is now {aside}")
    if text := decode.notice():
        print(f"note: {text}")
    run_dir.refuse_foreign()
    print(f"training {recipe.name} in {run_dir.path}", flush=True)
    from fortyfold.cli.display import Display
    from fortyfold.launch.attach import attached

    command = ["fortyfold", *sys.argv[1:]]
    with attached(run_dir, recipe.log.sinks, stop):
        with Display(run_dir, recipe.log.every_steps) as display:
            if num_ranks > 1:
                ended = _train_together(recipe, run_dir, stop, command, staged, num_ranks, display.say)
            else:
                ended = _train_here(recipe, run_dir, stop, command, staged, auto_accumulate)
        return _tell(run_dir, ended)


@dataclass(frozen=True)
class _Ended:
    """How training ended, as the run directory or the engine tells it."""

    step: int
    elapsed_seconds: float
    reason: str | None = None
    """Why it stopped; None when it is finished."""
    saved: bool = True
    already: bool = False
    """It had been finished before."""


def _train_here(
    recipe: Recipe,
    run_dir: RunDir,
    stop: "StopFlag",
    command: list[str],
    staged: "Staged | None",
    auto_accumulate: bool,
) -> _Ended:
    """One rank, in this process."""
    calm_openmp()
    from fortyfold.engine.train import train as train_run
    from fortyfold.launch.supervise import taking_over
    from fortyfold.spec.stop import hearing_requests

    with taking_over(run_dir), hearing_requests(run_dir, stop):
        outcome = train_run(recipe, run_dir, stop, command, staged, auto_accumulate=auto_accumulate)
    progress = outcome.progress
    return _Ended(progress.step, progress.elapsed_seconds, outcome.reason, bool(progress.step), outcome.already)


def _train_together(
    recipe: Recipe,
    run_dir: RunDir,
    stop: "StopFlag",
    command: list[str],
    staged: "Staged | None",
    num_ranks: int,
    say: "Callable[[str], object]",
) -> _Ended:
    """Several ranks, each in a process of its own; this one only looks after them."""
    from fortyfold.launch.environment import train_job
    from fortyfold.launch.local import run_local
    from fortyfold.spec.events import last_attempt, read_events
    from fortyfold.spec.stop import read_request

    before = last_attempt(read_events(run_dir.events()))
    ended = run_local(run_dir, train_job(recipe, run_dir.path.absolute(), command, staged), num_ranks, stop, say=say)
    events = read_events(run_dir.events())
    last: Event = events[-1] if events else {"kind": "nothing began"}
    if last["kind"] == "finished":
        return _Ended(last["step"], last["elapsed_seconds"], already=last_attempt(events) == before)
    step = run_dir.saved_steps()
    stop.ask_if(read_request(run_dir))  # another process may have asked
    reason = last["reason"] if last["kind"] == "stopped" else f"{stop.reason}; {ended.unsaved}"
    return _Ended(step or 0, 0.0, reason, saved=step is not None)


class _Stop(Exception):
    """Asked to stop while the data was being prepared."""


def _prepare_data(recipe: Recipe, stop: "StopFlag") -> "Staged | None":
    """Make the demo data if the recipe wants it, stage and index, each with a bar; gives the staged copy."""
    from fortyfold.cli.bars import bar
    from fortyfold.cli.data import make_demo_data
    from fortyfold.cli.data_stage import stage_data
    from fortyfold.data.demo import wanted_demo
    from fortyfold.data.splits import open_split
    from fortyfold.data.stage import scratch_folder

    def check() -> None:
        if stop.requested:
            raise _Stop

    root = Path(recipe.data.root)
    if demo := wanted_demo(recipe.data):
        make_demo_data(root, demo, check=check)
    staged = stage_data(root, scratch_folder(recipe.data.stage), check=check) if recipe.data.stage else None
    folder = staged.root if staged else root
    with bar(f"indexing {folder}", check) as report:
        open_split(folder, "train", progress=report)
    return staged


def _tell(run_dir: RunDir, ended: _Ended) -> int:
    from fortyfold.cli.display import duration
    from fortyfold.metrics.overview import overview

    if ended.reason is not None:
        saved = ", saved; the same command goes on from there" if ended.saved else "; the same command starts again"
        print(f"stopped ({ended.reason}) after step {ended.step}{saved}")
        return STOPPED
    view = overview(run_dir)
    if ended.already:
        print(f"{run_dir.path} is trained already; --fresh starts anew")
    speed = f", {view.images_per_second:.0f} img/s (mean of all steps)" if view.images_per_second else ""
    print(f"trained {view.num_epochs} epochs in {duration(ended.elapsed_seconds)}{speed}")
    if view.top1 is not None:
        print(f"top-1 {view.top1:.1f} % ({view.num_images} images)")
    weights = run_dir.checkpoints / run_dir.checkpoint_names()[0] / MODEL
    print(f"weights  {weights}\nresults  {run_dir.summary}\nlook at  fortyfold evaluate {run_dir.path}")
    return 0
