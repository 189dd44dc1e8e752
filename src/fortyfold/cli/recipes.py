"""`fortyfold recipes`: list them; `recipes show NAME` prints one, resolved, or draws its course."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from fortyfold.cli.options import RecipeArgument, SetOption, resolve
from fortyfold.spec.errors import UserError
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.recipe_file import built_in_names, read_text
from fortyfold.spec.run_dir import write_atomically
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
    plot: Annotated[bool, typer.Option("--plot", help="Draw learning rate, px and batch over epochs instead.")] = False,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Draw them to a PNG image instead.")
    ] = None,
    images: Annotated[
        int | None, typer.Option(min=1, help="Training images to draw for; default: the demo's, or ImageNet's.")
    ] = None,
) -> None:
    """Print a recipe as TOML, with every default filled in. What is printed can be trained as it is."""
    chosen = resolve(recipe, set_, {})
    if plot or png:
        if explain:
            raise UserError("--explain is about the TOML, which --plot and --png replace; leave one of them out")
        _draw(chosen, images, plot, png)
    else:
        print(to_toml(chosen, explain=explain), end="")


def _draw(recipe: Recipe, images: int | None, plot: bool, png: Path | None) -> None:
    from fortyfold.cli.course import default_images, lay_course

    course = lay_course(recipe, images or default_images(recipe))
    if plot:
        from fortyfold.cli.course_text import draw_text

        print(draw_text(course, min(120, max(40, shutil.get_terminal_size().columns))), end="")
    if png:
        from fortyfold.cli.course_png import draw_png

        write_atomically(png, draw_png(course))
        print(f"wrote {png}")
