"""What the environment of a host's workers says. The user's own choices stay."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fortyfold.data.cores import available_cores
from fortyfold.spec.openmp import calm
from fortyfold.spec.parent import parent_variable
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.run_dir import RunDir

JOB = "FORTYFOLD_JOB"
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def train_job(recipe: Recipe, run_dir: RunDir, staged: Path | None, command: Sequence[str]) -> dict[str, Any]:
    """The job of training: the same on every rank (api/worker.py)."""
    return {
        "verb": "train",
        "deadline_seconds": recipe.strategy.deadline_seconds,
        "run": str(run_dir.path.absolute()),
        "recipe": recipe.model_dump(mode="json"),
        "staged": str(staged) if staged else None,
        "command": list(command),
    }


def worker_environment(job: dict[str, Any], procs: int) -> dict[str, str]:
    """This process's environment with the job, the ranks' share of the cores, and Gloo on the loopback interface.

    Gloo would else take the interface of the host's name, which may lead out of the host or nowhere.
    """
    defaults = {"OMP_NUM_THREADS": str(max(1, available_cores() // procs))}
    if sys.platform in _LOOPBACK:
        defaults["GLOO_SOCKET_IFNAME"] = _LOOPBACK[sys.platform]
    environment = defaults | os.environ | {JOB: json.dumps(job), "PYTHONUNBUFFERED": "1"} | parent_variable()
    calm(environment)
    return environment
