"""`fortyfold sites check`: what is wrong with a site, found by doing what training would do, without training."""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.exit_codes import BAD_INPUT
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.site import Site
from fortyfold.spec.stop import StopFlag

if TYPE_CHECKING:
    from fortyfold.launch.plan import Plan

TOOLS = {
    "slurm": ("sbatch", "srun", "squeue", "scancel", "scontrol"),
    "pbs": ("qsub", "qstat", "qdel"),
    "ssh": ("ssh",),
}
DEADLINE_SECONDS = 60.0


def check_site(name: str, site: Site, run: bool, nodes: int | None, procs: int | None, data: Path | None) -> int:
    """Print every problem; gives the exit code."""
    from fortyfold.launch.contract import load_launcher

    if site.kind == "aws":
        return _check_aws(name, site, nodes, procs)
    missing = [f"there is no {tool} on this machine" for tool in TOOLS.get(site.kind, ()) if shutil.which(tool) is None]
    if missing or site.kind == "local":
        return _report(name, missing, "")
    plan, run_dir = _plan(name, site, nodes, procs, data)
    batch = load_launcher(site.kind).BATCH
    if batch and not run:
        return _report(name, [], "its commands are here; --run tries its nodes")
    try:
        problems = _try_nodes(plan, run_dir)
    finally:
        shutil.rmtree(run_dir.path, ignore_errors=True)
    return _report(name, problems, f"{len(plan.shapes)} nodes met, {plan.num_ranks} ranks")


def _check_aws(name: str, site: Site, nodes: int | None, procs: int | None) -> int:
    """Credentials, image, subnets and volumes; nothing is made."""
    from fortyfold.launch.aws.preview import preview

    plan, run_dir = _plan(name, site, nodes, procs, None)
    try:
        print(preview(plan, run_dir))
    except UserError as error:
        return _report(name, [str(error)], "")
    return _report(name, [], "nothing was made; its nodes are checked when a run starts")


def _plan(name: str, site: Site, nodes: int | None, procs: int | None, data: Path | None) -> "tuple[Plan, RunDir]":
    from fortyfold.launch.plan import make_plan, place_there, runs_here

    here = runs_here(site) / f".check-{os.getpid()}-{time.time_ns()}"
    run = place_there(site, here)
    job = {"verb": "check", "run": str(run), "deadline_seconds": DEADLINE_SECONDS, "data": str(data) if data else None,
           "staged": None, "recipe": {"log": {"sinks": [], "every_steps": 50}}}  # fmt: skip
    return make_plan(name, site, run, job, nodes, procs), RunDir(here)


def _try_nodes(plan: "Plan", run_dir: RunDir) -> list[str]:
    from fortyfold.launch.contract import load_launcher, write_files

    launcher = load_launcher(plan.site.kind)
    rendered = launcher.render(plan, interactive=launcher.BATCH)
    write_files(plan, rendered, run_dir)
    try:
        launcher.run(plan, rendered, run_dir, StopFlag().listen(), lambda text: print(text, file=sys.stderr))
    except (UserError, RunFailed) as error:
        return [str(error)]
    return _read_problems(run_dir)


def _read_problems(run_dir: RunDir) -> list[str]:
    try:
        return list(json.loads(run_dir.check.read_text(encoding="utf-8"))["problems"])
    except (OSError, ValueError, KeyError):
        logs = [log.read_text(encoding="utf-8", errors="replace") for log in sorted(run_dir.logs.glob("job-*.log"))]
        lines = [line for log in logs for line in log.splitlines() if line.startswith("fortyfold: ")]
        return [line.removeprefix("fortyfold: ") for line in dict.fromkeys(lines)] or ["the nodes gave no answer"]


def _report(name: str, problems: list[str], fine: str) -> int:
    for problem in problems:
        print(f"{name}: {problem}")
    if not problems:
        print(f"{name}: ok{f' ({fine})' if fine else ''}")
    return BAD_INPUT if problems else 0
