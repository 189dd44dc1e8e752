"""`fortyfold sites`: list them; `sites show SITE` prints one, `sites check SITE` tries it."""

from pathlib import Path
from typing import Annotated

import typer

from fortyfold.spec.errors import UserError
from fortyfold.spec.site_file import Entry, find_sites, load_site, site_files
from fortyfold.spec.toml_text import to_toml

app = typer.Typer(help="List the sites where runs may go, show or check one.", invoke_without_command=True)

SiteArgument = Annotated[str, typer.Argument(metavar="SITE", help="A site of sites.toml.")]


@app.callback()
def sites(context: typer.Context) -> None:
    """List the sites where runs may go, show or check one."""
    if context.invoked_subcommand is None:
        for entry in find_sites().values():
            print(f"{entry.name:<16} {_describe(entry)}  ({entry.source})")
        print(f"sites are written in {' and '.join(map(str, site_files()))}")


def _describe(entry: Entry) -> str:
    from fortyfold.launch.plan import describe_shapes

    try:
        site = entry.parse()
        return f"{site.kind:<6} {describe_shapes(site.shapes())}"
    except (UserError, ValueError) as error:
        return f"wrong: {error}"


@app.command()
def show(
    site: SiteArgument,
    explain: Annotated[bool, typer.Option("--explain", help="With each key's meaning above it.")] = False,
) -> None:
    """Print a site as TOML, with every default filled in."""
    print(to_toml(load_site(site), explain=explain), end="")


@app.command()
def check(
    site: SiteArgument,
    run: Annotated[bool, typer.Option("--run", help="Also on nodes, in a job of the scheduler's.")] = False,
    nodes: Annotated[int | None, typer.Option(min=1, help="So many nodes; default: the site's.")] = None,
    procs: Annotated[int | None, typer.Option(min=1, help="So many processes on each.")] = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Data that every node must be able to read.")] = None,
) -> int:
    """Try a site before trusting it with a run: commands, network, memory, disks, versions, GPUs, and that nodes meet.

    Every problem is a line. Exit codes: 0 none found, 2 some.
    """
    from fortyfold.cli.site_check import check_site

    return check_site(site, load_site(site), run, nodes, procs, data)
