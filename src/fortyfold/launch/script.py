"""Shell text: what a node does before our own program takes over, and pieces that job scripts share.

Every string that a user may have written goes through `quote`; nothing is ever put into a script unquoted.
"""

import os
import re
import shlex
from pathlib import Path

from fortyfold.launch.plan import Plan
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.site import RemoteSite, Site

_FIND_MODULE = """\
if ! command -v module >/dev/null; then
    for init in /etc/profile.d/{modules,lmod,z00_lmod}.sh "${MODULESHOME:-}/init/bash"; do
        # shellcheck source=/dev/null
        if [ -r "$init" ]; then . "$init"; fi
    done
fi"""


def quote(text: str) -> str:
    """One word for bash, on one line: a line break in it could begin a line that a scheduler takes for its own."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = (_escape(sign) if sign in "\\'" or not sign.isprintable() else sign for sign in text)
    return f"$'{''.join(escaped)}'"


def _escape(sign: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(sign))


def job_name(plan: Plan) -> str:
    """The run's name, as schedulers take one."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", f"fortyfold-{plan.name}")[:64]


def comment(text: str) -> str:
    """For people; whatever it holds, it stays a comment."""
    return "# " + "".join(sign if sign.isprintable() else "?" for sign in text)


def render_node(plan: Plan) -> str:
    """node.sh: what a node does, by whatever means it was started there."""
    folder = quote(str(plan.folder)) if plan.folder else '"$HOME"'
    lines = [
        "#!/bin/bash",
        comment(f"A node of the run {plan.name} on the site {plan.site_name}, written by fortyfold train."),
        "# Arguments: which start of the job this is; where only job.sh knows them, this node's number, how many there",
        "# are, when time is up, and where to write what this node has to say.",
        f"cd {folder} || exit 2",
        "umask 022",
        'export PATH="${PATH:-}:/usr/local/bin:/usr/bin:/bin" PYTHONUNBUFFERED=1',
        'if [ "$#" -gt 1 ]; then export FORTYFOLD_NODE="$2" FORTYFOLD_NODES="$3" FORTYFOLD_DEADLINE="${4:-}"; fi',
        'if [ -n "${5:-}" ]; then exec >> "$5" 2>&1; fi',
        *environment_lines(plan.site),
        *_start(plan),
    ]
    return "\n".join(lines) + "\n"


def environment_lines(site: Site) -> list[str]:
    """Modules, conda or venv, and variables, in this order."""
    lines = []
    if site.modules:
        lines += [_FIND_MODULE, *(f"module load {quote(name)} || exit 2" for name in site.modules)]
    if site.conda:
        lines += ['eval "$(conda shell.bash hook)" || exit 2', f"conda activate {quote(site.conda)} || exit 2"]
    if site.venv:
        lines += ["# shellcheck source=/dev/null", f". {quote_path(str(Path(site.venv, 'bin', 'activate')))} || exit 2"]
    return lines + [f"export {name}={quote(value)}" for name, value in site.variables.items()]


def quote_path(path: str) -> str:
    """Quoted, but ~/ at its beginning is the home folder."""
    return f'"$HOME"/{quote(path[2:])}' if path.startswith("~/") else quote(path)


def _start(plan: Plan) -> list[str]:
    """The agent; by ssh the launcher tells it the plan."""
    agent = f"{quote_path(plan.python)} -m fortyfold.launch.node"
    if not isinstance(plan.site, RemoteSite):
        agent += f' --plan {quote(str(RunDir(plan.run).plan))} --start "$1"'
    return in_container(plan, agent)


def in_container(plan: Plan, command: str) -> list[str]:
    """Lines that end in `command`, in the site's container if it has one; scheduler commands stay outside."""
    if plan.site.container is None:
        return [f"exec {command}"]
    made, binds = _made_folders(plan), list(map(quote_path, _seen_folders(plan)))
    options = " ".join(f"--bind {bind}" for bind in dict.fromkeys([*binds, *made]))
    if plan.folder:
        options += f" --pwd {quote(str(plan.folder))}"
    return [
        "container=$(command -v apptainer || command -v singularity) || {",
        '    echo "fortyfold: neither apptainer nor singularity is on $(hostname); load its module (modules)" >&2',
        "    exit 2",
        "}",
        f"mkdir -p {' '.join(made)} || exit 2",
        *(f'export APPTAINERENV_{name}="${name}" SINGULARITYENV_{name}="${name}"' for name in plan.site.variables),
        f'exec "$container" exec --nv {options} {quote_path(plan.site.container)} {command}',
    ]


def _seen_folders(plan: Plan) -> list[str]:
    """Where the command was given, the data, and what the site names."""
    data = plan.job.get("data") or plan.job.get("recipe", {}).get("data", {}).get("root", "")
    folders = [plan.folder, Path(data) if data.startswith("/") else None]
    return [*(str(folder) for folder in folders if folder), *plan.site.binds]


def _made_folders(plan: Plan) -> list[str]:
    """The folder of runs and the scratch, which a container sees only if they are there before; quoted."""
    return [quote_path(str(plan.run.parent)), *([_quote_filled(plan.site.scratch)] if plan.site.scratch else [])]


def _quote_filled(text: str) -> str:
    """Quoted, but environment variables are filled in, and ~/ at the beginning is the home folder."""
    text = re.sub(r"^~(?=/)", "$HOME", text)
    parts = re.split(r"\$(?:\{(\w+)\}|(\w+))", text, flags=re.ASCII)
    quoted = [quote(part) if part else "" for part in parts[::3]]
    names = [f'"${{{braced or plain}}}"' for braced, plain in zip(parts[1::3], parts[2::3], strict=True)]
    return "".join(part for pair in zip(quoted, [*names, ""], strict=True) for part in pair)
