"""`fortyfold aws`: data on EC2, and an end to what runs have left there."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import UserError
from fortyfold.spec.site_file import load_site

if TYPE_CHECKING:
    from pathlib import Path

    from fortyfold.launch.plan import Plan

app = typer.Typer(help="Data volumes on AWS, and an end to what runs have left there.", no_args_is_help=True)

SiteArgument = Annotated[str, typer.Argument(metavar="SITE", help="A site of kind aws.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@app.command()
def snapshot(
    site: SiteArgument,
    volume: Annotated[str, typer.Argument(metavar="VOLUME", help="The volume with the data: its id or name.")],
    name: Annotated[str, typer.Option(metavar="NAME", help="What to call the snapshot.")],
    yes: YesOption = False,
) -> None:
    """Make a snapshot of a data volume, and wait for it. (Ctrl-C ends the waiting, not the snapshot.)"""
    from fortyfold.launch.aws.data_volumes import await_snapshot, make_snapshot
    from fortyfold.launch.aws.session import connect

    ec2 = connect(_load(site))
    confirm(f"to be made: a snapshot {name} of {volume}; it stays, and costs, until it is deleted", yes)
    made = make_snapshot(ec2, volume, name)
    print(f"{made} is being made", flush=True)
    await_snapshot(ec2, made, print)
    print(f"{made} is complete; volumes of it: fortyfold aws volumes {site} VOLUME COUNT --snapshot {made} --zone ZONE")


@app.command()
def volumes(
    site: SiteArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="They are called NAME_0, NAME_1, …")],
    count: Annotated[int, typer.Argument(metavar="COUNT", min=1, help="How many: one a node.")],
    zone: Annotated[str, typer.Option(metavar="ZONE", help="Such as us-east-1a; instances must be there, too.")],
    snapshot: Annotated[
        str | None, typer.Option(metavar="SNAPSHOT", help="Its id or name; default: they are empty.")
    ] = None,
    size: Annotated[int | None, typer.Option(min=1, help="GiB of each; default: the snapshot's.")] = None,
    iops: Annotated[int | None, typer.Option(min=3000, max=80000, help="IOPS of each; default: gp3's 3000.")] = None,
    offset: Annotated[int, typer.Option(min=0, help="Begin with NAME_OFFSET.")] = 0,
    yes: YesOption = False,
) -> None:
    """Make gp3 volumes, empty or of a snapshot, one a node. Of a snapshot, the first reading of each block is slow."""
    from fortyfold.launch.aws.data_volumes import find_snapshot, make_volumes, require_new
    from fortyfold.launch.aws.session import connect

    if snapshot is None and size is None:
        raise UserError("empty volumes need --size; or name a --snapshot")
    ec2 = connect(_load(site))
    names = [f"{name}_{number}" for number in range(offset, offset + count)]
    require_new(ec2, names)
    source = find_snapshot(ec2, snapshot) if snapshot else None
    gib = size or (source or {}).get("VolumeSize")
    what = f"{count} gp3 volumes, {names[0]} to {names[-1]}, in {zone}: {gib} GiB and {iops or 3000} IOPS each"
    confirm(f"to be made: {what}; they stay, and cost, until they are deleted", yes)
    made = make_volumes(ec2, names, zone, source["SnapshotId"] if source else None, size, iops)
    for label, id_ in zip(names, made, strict=True):
        print(label, id_)


@app.command()
def reap(
    site: SiteArgument,
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run directory; default: all that you made from this machine."),
    ] = None,
    everybody: Annotated[bool, typer.Option("--everybody", help="What others have made, too.")] = False,
    yes: YesOption = False,
) -> None:
    """End instances, disks and security groups that runs have left at the site's region. Data volumes stay."""
    from fortyfold.launch.aws.reaping import find_left
    from fortyfold.launch.aws.reaping import reap as end
    from fortyfold.launch.aws.session import connect
    from fortyfold.launch.aws.tags import OWNER, own_name

    ec2 = connect(_load(site))
    tags = _tags_of(run) if run else {} if everybody else {OWNER: own_name()}
    if not (lines := find_left(ec2, tags).lines()):
        others = len(find_left(ec2, {}).lines())
        more = f"; of other runs and people {others}, which --everybody ends" if others else ""
        print(f"nothing is left of {run or ('anybody' if everybody else own_name())}{more}")
        return
    confirm("\n".join(["to be ended, with any run that uses it:", *(f"  {line}" for line in lines)]), yes)
    for line in end(ec2, tags):
        print(f"ended {line}")


def _tags_of(run: str) -> dict[str, str]:
    from pathlib import Path

    from fortyfold.launch.aws.tags import RUN, run_tag
    from fortyfold.spec.run_dir import RunDir

    return {RUN: run_tag(RunDir(Path(run)))}


def confirm_costs(plan: "Plan", here: "Path", yes: bool) -> None:
    """Show what training would make; go on if that is wanted."""
    from fortyfold.launch.aws.preview import preview
    from fortyfold.spec.run_dir import RunDir

    confirm(preview(plan, RunDir(here)), yes)


def confirm(what: str, yes: bool) -> None:
    """Show it, and ask, unless the answer was given with the command."""
    print(what, flush=True)
    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError("nobody is there to be asked; --yes goes on without")
    if not typer.confirm("go on?"):
        raise UserError("nothing was made or ended")


def _load(name: str) -> AwsSite:
    site = load_site(name)
    if not isinstance(site, AwsSite):
        raise UserError(f"{name} is a site of kind {site.kind}, not aws")
    return site
