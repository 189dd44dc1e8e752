"""What the environment of a host's workers says. The user's own choices stay."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fortyfold.data.cores import available_cores
from fortyfold.data.stage import Staged
from fortyfold.spec.openmp import calm
from fortyfold.spec.parent import parent_variable
from fortyfold.spec.recipe import Recipe

JOB = "FORTYFOLD_JOB"
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def train_job(recipe: Recipe, run: Path, command: Sequence[str], staged: Staged | None = None) -> dict[str, Any]:
    """The job of training: the same on every rank (api/worker.py)."""
    return {
        "verb": "train",
        "deadline_seconds": recipe.strategy.deadline_seconds,
        "run": str(run),
        "recipe": recipe.model_dump(mode="json"),
        "staged": staged.to_json() if staged else None,
        "command": list(command),
    }


def worker_environment(
    job: dict[str, Any], procs: int, interface: str | None = None, *, preset_threads: bool = False
) -> dict[str, str]:
    """This process's environment with the job, the ranks' share of the cores, and Gloo on one interface.

    Without `interface` all ranks are here, and that is the loopback: Gloo would else take the interface of the host's
    name, which may lead out of the host or nowhere. `preset_threads`: OMP_NUM_THREADS is not the user's but the
    scheduler's, which knows nothing of ranks.
    """
    defaults = {"OMP_NUM_THREADS": str(max(1, available_cores() // procs))}
    if interface is not None:
        defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": "^docker0,lo"}
    elif sys.platform in _LOOPBACK:
        defaults["GLOO_SOCKET_IFNAME"] = _LOOPBACK[sys.platform]
    environment = defaults | os.environ | {JOB: json.dumps(job), "PYTHONUNBUFFERED": "1"} | parent_variable()
    if preset_threads:
        environment["OMP_NUM_THREADS"] = defaults["OMP_NUM_THREADS"]
    calm(environment)
    return environment
