"""`fortyfold recipes`: list them; `recipes show NAME` prints one, resolved."""

from typing import Annotated

import typer

from fortyfold.cli.options import RecipeArgument, SetOption, resolve
from fortyfold.spec.recipe_file import built_in_names, read_text
from fortyfold.spec.toml_text import to_toml

app = typer.Typer(help="List the built-in recipes, or show one.", invoke_without_command=True)


@app.callback()
def recipes(context: typer.Context) -> None:
    """List the built-in recipes, or show one."""
    if context.invoked_subcommand is None:
        for name in built_in_names():
            print(f"{name:<12} {read_text(name)[1].splitlines()[0].removeprefix('# ')}")


@app.command()
def show(
    recipe: RecipeArgument,
    set_: SetOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="With each key's meaning above it.")] = False,
) -> None:
    """Print a recipe as TOML, with every default filled in. What is printed can be trained as it is."""
    print(to_toml(resolve(recipe, set_, {}), explain=explain), end="")
