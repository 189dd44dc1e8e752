"""Which node this is, of how many, and with how many GPUs: what each scheduler says of it in the environment."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from fortyfold.spec.errors import UserError


@dataclass(frozen=True)
class Names:
    """The environment variables that tell."""

    node: str
    num_nodes: str
    gpus: str | None = None


# What node.sh is told by its arguments where the scheduler does not say it (launch/script.py).
OURS = Names(node="FORTYFOLD_NODE", num_nodes="FORTYFOLD_NODES")
TABLE: dict[str, Names] = {
    "slurm": Names(node="SLURM_NODEID", num_nodes="SLURM_STEP_NUM_NODES", gpus="SLURM_GPUS_ON_NODE"),
    "pbs": OURS,
    "ssh": OURS,
    "aws": OURS,
}


@dataclass(frozen=True)
class Place:
    node: int
    num_nodes: int
    num_gpus: int | None
    """None where nobody knows of any."""


def find_place(kind: str, environment: Mapping[str, str] = os.environ) -> Place:
    names = TABLE[kind]
    return Place(
        node=_number(names.node, environment, kind),
        num_nodes=_number(names.num_nodes, environment, kind),
        num_gpus=count_gpus(names.gpus, environment),
    )


def _number(name: str, environment: Mapping[str, str], kind: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise UserError(f"{name} is {text!r}, not a number; is this a node of a {kind} job?")
    return int(text)


def count_gpus(name: str | None, environment: Mapping[str, str]) -> int | None:
    """By the scheduler's word, else by the devices that are visible, else by nvidia-smi."""
    if name and environment.get(name, "").isdecimal():
        return int(environment[name])
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([token for token in visible.split(",") if token.strip()])  # numbers, UUIDs or MIG names
    if shutil.which("nvidia-smi") is None:
        return None
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    return len([line for line in listed.stdout.splitlines() if line.startswith("GPU ")])
