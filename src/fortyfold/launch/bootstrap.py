"""fortyfold on hosts that do not have it: a wheel of the one that runs here, installed there once a version.

The wheel is made of the files of this installation, so that the hosts run just this code, wherever it came from. What
it needs is installed by the host's own pip, in the versions that are here.
"""

import base64
import hashlib
import io
import sysconfig
import zipfile
from functools import cache
from importlib.metadata import distribution, distributions
from importlib.resources import files
from pathlib import Path

from fortyfold.launch import remote
from fortyfold.launch.script import environment_lines, quote, quote_path
from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import UserError
from fortyfold.spec.site import RemoteSite

FOLDER = "~/.cache/fortyfold"
OLDEST_PYTHON = (3, 11)
_LEFT_OUT = ("__pycache__",)

_CHECK = """\
if [ -e "$HOME"/.cache/fortyfold/{tag}/installed ]; then echo there; exit; fi
{python} -c 'import sys, venv, ensurepip; print(sys.version_info[0], sys.version_info[1])'
"""
# A function, so that bash has read all of it before `head` reads what follows.
_INSTALL = """\
set -e
install() {{
folder="$HOME"/.cache/fortyfold/{tag}
mkdir -p "$folder"
exec 9> "$folder/lock"
flock 9
head -c {constraints_bytes} > "$folder/constraints.txt"
head -c {wheel_bytes} > "$folder/{wheel_name}"
{python} -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --force-reinstall \\
    --constraint "$folder/constraints.txt" "$folder/{wheel_name}"{extra} >&2
touch "$folder/installed"
}}
install
"""


def bootstrap(site: RemoteSite, host: str, say: remote.Say) -> None:
    """See that the host has this version, if that is the site's wish."""
    if site.bootstrap == "there":
        remote.run(site, host, "true\n")  # one that does not answer is named at once
        return
    name, wheel = make_wheel()
    python = quote_path(site.python or "python3")
    script = _CHECK.format(tag=tag(site), python=python)
    said = remote.run(site, host, "\n".join([*environment_lines(site), script])).split()
    if said[-1:] == [b"there"]:
        return
    _require_version(host, said)
    say(f"installing fortyfold on {host}")
    constraints = pinned_versions().encode()
    script = _INSTALL.format(
        tag=tag(site), python=python, wheel_name=name,
        wheel_bytes=len(wheel), constraints_bytes=len(constraints), extra=quote(_extra(site)),
    )  # fmt: skip
    remote.run(site, host, "\n".join([*environment_lines(site), script]), constraints + wheel)


def _require_version(host: str, said: list[bytes]) -> None:
    """`said` ends in the version of the host's Python."""
    major, minor = (int(word) for word in said[-2:])
    if (major, minor) < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        raise UserError(
            f"host {host} has Python {major}.{minor}, and {wanted} or newer is needed; see python in the site"
        )


def installed_python(site: RemoteSite) -> str:
    """The interpreter that a bootstrap leaves on the hosts."""
    return f"{FOLDER}/{tag(site)}/venv/bin/python"


def tag(site: RemoteSite) -> str:
    """Names an installation: what is in the wheel, and what the site asks of the environment around it."""
    name, wheel = make_wheel()
    around = repr([site.python, site.modules, site.conda, site.venv, site.variables, _extra(site)]).encode()
    return f"{name.split('-')[1]}-{hashlib.sha256(wheel + around).hexdigest()[:16]}"


def _extra(site: RemoteSite) -> str:
    """What the hosts need besides."""
    return "[aws]" if isinstance(site, AwsSite) and site.run_store else ""


@cache
def make_wheel() -> tuple[str, bytes]:
    """(file name, content) of a wheel that installs the fortyfold of this process; the same files make the same."""
    package = Path(str(files("fortyfold")))
    own = distribution("fortyfold")
    machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    label = f"cp{''.join(map(str, OLDEST_PYTHON))}-abi3-{machine}"  # as native code is built (setup.py)
    info = f"fortyfold-{own.version}.dist-info"
    metadata, entry_points = own.read_text("METADATA"), own.read_text("entry_points.txt") or ""
    if metadata is None:
        raise UserError("this installation of fortyfold has no metadata to make a wheel of; install it by pip")
    content = {
        f"fortyfold/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and not any(part in _LEFT_OUT for part in path.parts)
    }
    content |= {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: fortyfold\nRoot-Is-Purelib: false\nTag: {label}\n".encode(),
        f"{info}/entry_points.txt": entry_points.encode(),
    }
    content[f"{info}/RECORD"] = _record(content, info)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return f"fortyfold-{own.version}-{label}.whl", buffer.getvalue()


def _record(files: dict[str, bytes], info: str) -> bytes:
    lines = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    return "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()


def pinned_versions() -> str:
    """Every package that is installed here, as constraints for pip; a build's own suffix (+cpu) is left off."""
    pins = {
        found.metadata["Name"]: found.version.partition("+")[0]
        for found in distributions()
        if found.metadata["Name"] and found.metadata["Name"].lower() != "fortyfold"
    }
    return "".join(f"{name}=={version}\n" for name, version in sorted(pins.items(), key=lambda pin: pin[0].lower()))
