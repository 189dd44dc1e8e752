"""From a site's name to a Site. Sites stand in sites.toml: in this folder, then in the user's configuration folder.

The first file that has the name wins, whole: two halves of a site from two files would be nobody's. `local` is always
there.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import UserError
from fortyfold.spec.plugin import nearest
from fortyfold.spec.recipe_file import parse_section
from fortyfold.spec.site import LocalSite, PbsSite, Site, SlurmSite, SshSite

KINDS: dict[str, type[Site]] = {
    "local": LocalSite,
    "ssh": SshSite,
    "slurm": SlurmSite,
    "pbs": PbsSite,
    "aws": AwsSite,
}
_SYNONYMS = {
    "queue": "partition", "partition": "queue", "walltime": "time_limit", "time": "time_limit", "mem": "memory",
    "ncpus": "cpus", "ngpus": "gpus", "host": "hosts", "output": "logs",
}  # fmt: skip
FILE = "sites.toml"
LOCAL = {"kind": "local"}


@dataclass(frozen=True)
class Entry:
    """A site as it was found; not checked yet, so that a wrong one does not hide the others."""

    name: str
    raw: dict[str, Any]
    source: str

    def parse(self) -> Site:
        """The Site; every mistake is a UserError of one line."""
        return parse_site(self.raw, source=f"{self.source}, site {self.name}")


def site_files() -> list[Path]:
    """Where sites are looked for, the first first."""
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return [Path(FILE), Path(config).expanduser() / "fortyfold" / FILE]


def find_sites() -> dict[str, Entry]:
    """All sites by name."""
    found = {"local": Entry("local", LOCAL, "built in")}
    for path in reversed(site_files()):
        read = _read(path)
        if "local" in read:
            raise UserError(f"{path}: local is this machine, and always there; give the site another name")
        found |= {name: Entry(name, raw, str(path)) for name, raw in read.items()}
    return found


def load_site(name: str) -> Site:
    sites = find_sites()
    if name not in sites:
        places = " and ".join(map(str, site_files()))
        raise UserError(f"no site {name!r}{nearest(name, sites) or f'; sites are written in {places}'}")
    return sites[name].parse()


def parse_site(raw: Mapping[str, Any], *, source: str) -> Site:
    kind = raw.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        what = "kind is missing" if kind is None else f"there is no kind {kind!r}"
        raise UserError(f"{source}: {what}; there are: {', '.join(KINDS)}{nearest(str(kind), KINDS)}")
    for key in raw.keys() - KINDS[kind].model_fields.keys():
        if hint := _others_word(kind, key):
            raise UserError(f"{source}: unknown key {key}{hint}")
    return parse_section(KINDS[kind], raw, source=source)


def _others_word(kind: str, key: str) -> str:
    """For a key that a scheduler, or another kind of site, knows by that name."""
    here = KINDS[kind].model_fields
    if (ours := _SYNONYMS.get(key)) in here:
        return f"; did you mean {ours}?"
    others = [other for other, section in KINDS.items() if key in section.model_fields]
    return f"; it is for kind {' and '.join(others)}" if others else ""


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    for name, site in raw.items():
        if not isinstance(site, dict):
            raise UserError(f"{path}: {name} stands outside of a site; write it below a line such as [my-cluster]")
    return raw
