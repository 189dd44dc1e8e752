"""`fortyfold train --on SITE`: the same training in another place."""

import shlex
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import UserError
from fortyfold.spec.events import read_events
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.site import Site

if TYPE_CHECKING:
    from fortyfold.launch.contract import Launcher, Rendered
    from fortyfold.launch.plan import Plan


@dataclass(frozen=True)
class Wishes:
    """What the command line says beside the recipe."""

    site_name: str
    site: Site
    nodes: int | None = None
    procs: int | None = None
    out: Path | None = None
    interactive: bool = False
    dry_run: bool = False
    watch: bool = False
    fresh: bool = False
    yes: bool = False


def train_on(recipe: Recipe, wishes: Wishes) -> int:
    """Hand the run over to its site; gives the exit code."""
    from fortyfold.launch.contract import load_launcher, write_files
    from fortyfold.launch.sense import require_sense

    plan = replace(_plan(recipe, wishes), fresh=wishes.fresh)
    launcher = load_launcher(plan.site.kind)
    rendered = launcher.render(plan, wishes.interactive)
    require_sense(recipe, plan)
    if wishes.dry_run:
        _show(plan, rendered, _run_here(recipe, wishes))
        return 0
    run_dir = RunDir(_run_here(recipe, wishes))
    _require_free(run_dir)
    if not wishes.fresh and _is_finished(run_dir):
        print(f"{run_dir.path} is trained already; --fresh starts anew")
        return 0
    if isinstance(plan.site, AwsSite):
        from fortyfold.cli.aws import confirm_costs

        confirm_costs(plan, run_dir.path, wishes.yes)
    aside = run_dir.set_aside() if wishes.fresh else None
    if aside:
        print(f"the run that was here is now {aside}")
    run_dir.refuse_foreign()
    write_files(plan, rendered, run_dir)
    if wishes.interactive or not launcher.BATCH:
        from fortyfold.cli.foreground import train_in_foreground

        return train_in_foreground(launcher, plan, rendered, run_dir)
    _submit(launcher, plan, rendered, run_dir, aside)
    if wishes.watch:
        from fortyfold.cli.watch import watch

        return watch(run_dir.path)
    return 0


def _submit(launcher: "Launcher", plan: "Plan", rendered: "Rendered", run_dir: RunDir, aside: Path | None) -> None:
    """Hand it over. A run that is not accepted leaves nothing, and one that was set aside is where it was."""
    try:
        job = launcher.submit(plan, rendered)
    except UserError:
        if not run_dir.exists:
            shutil.rmtree(run_dir.path)
        if aside:
            print(f"{aside} is {aside.rename(run_dir.path)} again")
        raise
    job.write(run_dir)
    _tell(plan, job.id)


def _plan(recipe: Recipe, wishes: Wishes) -> "Plan":
    from fortyfold.launch.environment import train_job
    from fortyfold.launch.plan import make_plan, place_there

    site = wishes.site
    run = place_there(site, _run_here(recipe, wishes))
    job = train_job(recipe, run, ["fortyfold", *sys.argv[1:]])
    return make_plan(wishes.site_name, site, run, job, wishes.nodes, wishes.procs)


def _run_here(recipe: Recipe, wishes: Wishes) -> Path:
    """The run directory as this machine sees it."""
    from fortyfold.launch.plan import runs_here

    return (wishes.out or runs_here(wishes.site) / recipe.name).absolute()


def _show(plan: "Plan", rendered: "Rendered", here: Path) -> None:
    from fortyfold.launch.plan import describe_shapes

    for path, text in rendered.files.items():
        print(f"# {here / path.relative_to(plan.run)}\n{text}")
    print("# then", *map(shlex.join, rendered.commands), sep="\n")
    print(f"# {describe_shapes(plan.shapes)}" + (f"; the run is kept in {plan.store}" if plan.store else ""))


def _require_free(run_dir: RunDir) -> None:
    """A UserError while an earlier job of the run may still train in it."""
    from fortyfold.launch.contract import load_launcher, read_job

    job = read_job(run_dir)
    if job is not None and (state := load_launcher(job.kind).state(job)):
        raise UserError(
            f"{run_dir.path} is {job.kind} job {job.id} already ({state}); "
            f"`fortyfold watch {run_dir.path}` follows it, `fortyfold stop {run_dir.path}` ends it"
        )


def _is_finished(run_dir: RunDir) -> bool:
    events = read_events(run_dir.events())
    return bool(events) and events[-1]["kind"] == "finished"


def _tell(plan: "Plan", job_id: str) -> None:
    from fortyfold.launch.plan import describe_shapes

    run = shlex.quote(str(plan.run))
    print(f"submitted {plan.name} to {plan.site_name} as job {job_id}: {describe_shapes(plan.shapes)}")
    print(f"follow it  fortyfold watch {run}\nend it     fortyfold stop {run}", flush=True)
