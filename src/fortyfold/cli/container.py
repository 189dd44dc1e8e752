"""`fortyfold container`: the definition of a container with fortyfold in it, and fetching one."""

import re
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Containers for sites that run in one (Apptainer, Singularity).", no_args_is_help=True)


@app.command("def")
def define(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it.")] = Path("container"),
) -> None:
    """Write an Apptainer definition with this fortyfold and the versions that are installed here."""
    from fortyfold.launch.container import write_definition

    path = write_definition(folder)
    print(f"wrote {path}, and beside it what it needs")
    print(f"build it   cd {folder} && apptainer build fortyfold.sif {path.name}")


@app.command()
def pull(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="docker://…, library://… or oras://…")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The .sif file; default: by the image's name.")
    ] = None,
) -> None:
    """Fetch an image once, so that no node has to."""
    from fortyfold.launch.container import pull as fetch

    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", image.rpartition("/")[2]) or "image"
    fetch(image, out or Path(f"{name}.sif"))
