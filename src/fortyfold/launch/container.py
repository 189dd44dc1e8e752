"""Containers for Apptainer: the definition of one with fortyfold as it is here, and fetching an image."""

import platform
import shutil
import subprocess
from pathlib import Path

from fortyfold.launch.bootstrap import make_wheel, pinned_versions
from fortyfold.spec.errors import RunFailed, UserError

DEFINITION, CONSTRAINTS = "fortyfold.def", "constraints.txt"

_TEXT = """\
Bootstrap: docker
From: python:{python}-slim

%files
    {wheel} /opt/{wheel}
    {constraints} /opt/{constraints}

%post
    apt-get update
    apt-get install --yes --no-install-recommends libjpeg62-turbo
    rm -rf /var/lib/apt/lists/*
    python3 -m pip install --no-cache-dir --constraint /opt/{constraints} /opt/{wheel}

%environment
    export LC_ALL=C.UTF-8

%runscript
    exec fortyfold "$@"

%labels
    fortyfold {version}
"""


def render_definition() -> str:
    name, _ = make_wheel()
    python = ".".join(platform.python_version_tuple()[:2])
    return _TEXT.format(python=python, wheel=name, constraints=CONSTRAINTS, version=name.split("-")[1])


def write_definition(folder: Path) -> Path:
    """The definition, and beside it the wheel and the versions that it needs; gives its place."""
    folder.mkdir(parents=True, exist_ok=True)
    name, wheel = make_wheel()
    (folder / name).write_bytes(wheel)
    (folder / CONSTRAINTS).write_text(pinned_versions(), encoding="utf-8")
    (folder / DEFINITION).write_text(render_definition(), encoding="utf-8")
    return folder / DEFINITION


def pull(image: str, file: Path) -> None:
    """Fetch an image (docker://…, library://…) into a .sif file, by Apptainer or Singularity."""
    program = shutil.which("apptainer") or shutil.which("singularity")
    if program is None:
        raise UserError("neither apptainer nor singularity is on this machine; load its module, or install it")
    if file.exists():
        raise UserError(f"{file} is there already; remove it, or give another --out")
    done = subprocess.run([program, "pull", str(file), image])
    if done.returncode:
        raise RunFailed(f"{Path(program).name} pull failed with exit code {done.returncode}")
