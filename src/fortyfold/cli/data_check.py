"""`fortyfold data check`"""

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fortyfold.cli.bars import bar

if TYPE_CHECKING:
    from fortyfold.data.prepare.findings import Findings

FOUND = 1

_NAMED = 10  # findings of a kind that are named in the terminal


def check(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder with train/ and val/, or with class folders.")
    ],
    pixels: Annotated[bool, typer.Option("--pixels", help="Decode every image, too: as long as an epoch.")] = False,
    threads: Annotated[int, typer.Option(min=0, help="Threads that work; 0: one a core.")] = 0,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every finding there, as JSON.")] = None,
) -> None:
    """Look for what would stop a training, lose an image or spoil the result. Changes nothing.

    Classes that train or val lacks, unreadable and truncated files, images of val in train, duplicates, and
    files that are not what their names say. Exit code 1 if something is wrong, else 0.
    """
    from fortyfold.data.prepare.check import CHECKS, SLOW, DataSet, describe_splits, imagenet_lines
    from fortyfold.data.prepare.findings import Findings
    from fortyfold.spec.run_dir import write_json

    with bar("indexing"):
        data = DataSet(folder, threads)
    findings = Findings(data.name)
    for split, about in describe_splits(data).items():
        print(f"{split:<8}{about['images']} images, {about['classes']} classes, {about['folder']}", flush=True)
    for title, look in CHECKS.items():
        if pixels or title not in SLOW:
            with bar(title) as progress:
                look(data, findings, progress)
    for line in imagenet_lines(data):
        print(line)
    _print_findings(findings)
    if report is not None:
        write_json(report, {"splits": describe_splits(data), "pixels": pixels, "findings": findings.as_json()})
        print(f"every finding is in {report}")
    if num_wrong := findings.num_wrong():
        print(f"wrong: {num_wrong} findings that stop a training, lose an image or spoil the result")
        raise typer.Exit(FOUND)
    print("nothing is wrong" if pixels else "nothing is wrong (pixels were not looked at: --pixels)")


def _print_findings(findings: "Findings") -> None:
    for _, kind, count in findings.found():
        print(f"{'wrong' if kind.wrong else 'note':<6}{count:>8}  {kind.text}")
    for key, kind, count in findings.found():
        print(f"{kind.text}:")
        for name, about in islice(findings.entries(key), _NAMED):
            print(f"  {name}{': ' if about else ''}{about}")
        if count > _NAMED:
            print(f"  and {count - _NAMED} more")
