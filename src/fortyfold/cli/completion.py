"""Completion for bash, zsh and fish: the two options that set it up, and what is offered. No torch.

typer makes the scripts and answers them (through the variable _FORTYFOLD_COMPLETE). Its own options guess the shell
from the process tree, which fails in a container and ignores a shell that was named; ours take it.
"""

import re
from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import completion_init, get_completion_script, install  # type: ignore[attr-defined]

from fortyfold.spec.recipe_file import built_in_names, settable_keys

PROGRAM, VARIABLE = "fortyfold", "_FORTYFOLD_COMPLETE"
Shell = StrEnum("Shell", ["bash", "zsh", "fish"])

completion_init()


def complete_recipe(incomplete: str) -> list[str]:
    """Recipes by name; for a path, nothing, and then the shell offers files."""
    return [name for name in built_in_names() if name.startswith(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    """Keys of the recipe, for --set KEY=VALUE; those of the phase that was named, else of the first."""
    phase = re.match(r"phases\.\d+\.", incomplete)
    keys = (key.replace("phases.0.", phase[0]) if phase else key for key in settable_keys())
    found = [f"{key}=" for key in keys if key.startswith(incomplete)]
    # Of a single word a shell would put a space behind the =; of two it stops there.
    return [*found, f"{found[0]}VALUE"] if len(found) == 1 else found


def _install(shell: Shell | None) -> None:
    if shell is not None:
        print(f"completion for {shell} is now in {install(shell, PROGRAM, VARIABLE)[1]}; it works in the next shell")
        raise typer.Exit


def _show(shell: Shell | None) -> None:
    if shell is not None:
        print(get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell))
        raise typer.Exit


def completion(
    install_completion: Annotated[
        Shell | None,
        typer.Option(callback=_install, is_eager=True, help="Complete commands in this shell from now on."),
    ] = None,
    show_completion: Annotated[
        Shell | None, typer.Option(callback=_show, is_eager=True, help="Print the script that does so.")
    ] = None,
) -> None:
    """The program's own options; each does its work and ends it."""
