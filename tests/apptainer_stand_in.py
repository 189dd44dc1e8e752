"""A stand-in for Apptainer: `apptainer exec` on an image that is any file, with all of this machine inside.

As the real one it refuses a bind whose source is missing, sets PATH and drops LD_LIBRARY_PATH whatever they were
outside, passes other variables on, sets those that APPTAINERENV_… name, and APPTAINER_CONTAINER. It notes that it ran
beside the image.
"""

import os
import sys
from pathlib import Path

PREFIX = "APPTAINERENV_"


def install(folder: Path) -> Path:
    """Put the command into a folder for PATH; gives an image."""
    folder.mkdir()
    script = folder / "apptainer"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} "$@"\n')
    script.chmod(0o755)
    image = folder / "image.sif"
    image.touch()
    return image


def main(arguments: list[str]) -> None:
    assert arguments[:2] == ["exec", "--nv"], arguments
    del arguments[:2]
    while arguments[0].startswith("--"):
        option, value = arguments[:2]
        del arguments[:2]
        if option == "--bind":
            assert Path(value.partition(":")[0]).exists(), f"mount source {value} doesn't exist"
        else:
            assert option == "--pwd", option
            os.chdir(value)
    image = arguments.pop(0)
    Path(f"{image}.ran").touch()
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment["APPTAINER_CONTAINER"] = image
    environment["PATH"] = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    inside = {name.removeprefix(PREFIX): value for name, value in os.environ.items() if name.startswith(PREFIX)}
    os.execvpe(arguments[0], arguments, environment | inside)  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
