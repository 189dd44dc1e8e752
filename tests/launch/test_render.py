"""Scripts as they are rendered: compared with golden files, read by shellcheck, and run with hostile names in them.

`python -m launch.test_render`, called in tests/, writes the golden files anew.
"""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import skip_or_fail
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fortyfold.launch.contract import Rendered, load_launcher
from fortyfold.launch.plan import Plan
from fortyfold.launch.script import render_node
from fortyfold.spec import plugin
from fortyfold.spec.errors import UserError
from fortyfold.spec.site_file import parse_site

GOLDEN = Path(__file__).parents[1] / "golden" / "launch"
CONDA = {"modules": ["anaconda3/2022.05-gcc/9.5.0"], "conda": "pytorch"}
A100 = {"cpus": 50, "memory": "250gb", "gpus": 2, "attributes": {"gpu_model": "a100", "phase": 28}}
REQUESTS: dict[str, tuple[dict[str, Any], int, bool]] = {  # site, nodes, interactive
    "palmetto-40": ({"kind": "pbs", **A100, "time_limit": "0:20:00", **CONDA}, 20, False),
    "palmetto-40-interactive": ({"kind": "pbs", **A100, "time_limit": "0:20:00", **CONDA}, 20, True),
    "palmetto-1": (
        {"kind": "pbs", "cpus": 25, "memory": "125gb", "gpus": 1, "attributes": {"gpu_model": "a100", "phase": 29},
         "time_limit": "1:00:00", **CONDA}, 1, True,
    ),
    "pbs-unequal": ({"kind": "pbs", "queue": "gpuq", "account": "p1", "groups": [{"gpus": 2}, {"gpus": 1}]}, 2, False),
    "v100-2x2": (
        {"kind": "slurm", "cpus": 16, "memory": "32GB", "gpus": "v100:2", "time_limit": "1:00:00",
         "modules": ["anaconda3"], "conda": "PytorchDDPExample"}, 2, False,
    ),
    "v100-2x2-interactive": (
        {"kind": "slurm", "cpus": 16, "memory": "32GB", "gpus": "v100:2", "time_limit": "1:00:00",
         "modules": ["anaconda3"], "conda": "PytorchDDPExample"}, 2, True,
    ),
    "a40-4": (
        {"kind": "slurm", "gpus": "A40:4", "account": "NAISS2024-1", "partition": "alvis", "constraint": "a40&ssd",
         "qos": "high", "time_limit": "2-00:00:00", "lines": ["--reservation=imagenet"]}, 1, False,
    ),
    "slurm-container": (
        {"kind": "slurm", "gpus": 4, "container": "/images/fortyfold.sif", "binds": ["/scratch", "/data:/data:ro"],
         "variables": {"NCCL_DEBUG": "INFO"}}, 2, False,
    ),
    "ssh-two": ({"kind": "ssh", "hosts": ["gpu1", "gpu2", "gpu3"], "procs": 8, "venv": "/opt/venv"}, 2, False),
}  # fmt: skip


def make_plan(raw: dict[str, Any], nodes: int, run: str = "/home/u/runs/resnet50", folder: str = "/home/u") -> Plan:
    site = parse_site(raw, source="the test")
    shapes = site.shapes(None if site.groups else nodes)
    job = {"recipe": {"log": {"sinks": [], "every_steps": 50}}}
    own = site.conda or site.venv or site.container
    return Plan("there", site, shapes, Path(run), Path(folder), "python3" if own else "/opt/venv/bin/python", job)


def render(name: str) -> Rendered:
    raw, nodes, interactive = REQUESTS[name]
    return load_launcher(raw["kind"]).render(make_plan(raw, nodes), interactive)


def text_of(rendered: Rendered) -> str:
    scripts = [f"# {path}\n{text}" for path, text in rendered.files.items()]
    return "\n".join([*scripts, "# then", *map(shlex.join, rendered.commands), ""])


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_are_rendered_as_before(name: str) -> None:
    assert text_of(render(name)) == (GOLDEN / f"{name}.txt").read_text()


def test_every_launcher_is_among_them() -> None:
    assert {raw["kind"] for raw, _, _ in REQUESTS.values()} | {"aws"} >= set(plugin.names("fortyfold.launch.kinds"))


@pytest.fixture(scope="module")
def shellcheck() -> str:
    path = shutil.which("shellcheck")
    if path is None:
        skip_or_fail("shellcheck", "shellcheck is not installed")
    return str(path)


@pytest.mark.parametrize("name", REQUESTS)
def test_shellcheck_has_no_complaint(name: str, shellcheck: str) -> None:
    for text in render(name).files.values():
        done = subprocess.run([shellcheck, "--shell=bash", "-"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


# What the scripts ask for that fortyfold takes the place of: 40 A100s, 2×2 V100s, 16×8 V100s on AWS, 4×8 T4s.
WANTED: dict[str, tuple[int, dict[str, Any]]] = {
    "40-gpus": (20, {"gpus": 2, "cpus": 50, "memory": "250gb"}),
    "two-by-two": (2, {"gpus": 2, "cpus": 16, "memory": "32gb"}),
    "sixteen-machines": (16, {"gpus": 8}),
    "32-gpus": (4, {"gpus": 8}),
}
PLACES: dict[str, dict[str, Any]] = {
    "slurm": {"time_limit": "0:20:00"},
    "pbs": {"time_limit": "0:20:00"},
    "ssh": {"hosts": [f"gpu{number}" for number in range(20)]},
    "aws": {"region": "us-east-1", "instance_type": "p3.16xlarge", "ami": "training-*", "key": "mine", "spot": True,
            "volume": "imagenet", "volume_offset": 2, "ssh_from": "192.0.2.7"},
}  # fmt: skip


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("kind", PLACES)
def test_every_kind_takes_every_request(kind: str, wanted: str, shellcheck: str) -> None:
    nodes, keys = WANTED[wanted]
    if kind == "aws":  # the type of an instance says the rest
        keys = {"procs": keys["gpus"]}
    rendered = load_launcher(kind).render(make_plan({"kind": kind, **PLACES[kind], **keys}, nodes), False)
    for path, text in rendered.files.items():
        if path.suffix == ".sh":
            done = subprocess.run([shellcheck, "--shell=bash", "-"], input=text, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout
    if kind in ("ssh", "aws"):
        assert len(rendered.commands) == nodes
    else:
        job = next(text for path, text in rendered.files.items() if path.name == "job.sh")
        assert {"slurm": f"--nodes={nodes}\n", "pbs": f"-l select={nodes}:"}[kind] in job


HOSTILE = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="/\0"), min_size=1, max_size=30)
NASTY = st.sampled_from([
    "$(touch CANARY)", "`touch CANARY`", "'; touch CANARY; '", '"; touch CANARY; "', "a\ntouch CANARY\n",
    "\n#SBATCH --wrap=x", "\n#PBS -x",
    "a b", "-rf", "${IFS}", "\\", "%j", "*", "~", "ü",
])  # fmt: skip
NAMES = st.one_of(HOSTILE, NASTY, st.tuples(NASTY, HOSTILE).map("".join)).filter(lambda name: name not in (".", ".."))
PRINTABLE = st.one_of(
    st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), min_size=1, max_size=30),
    st.sampled_from(["$(touch CANARY)", "`touch CANARY`", "'; touch CANARY; '", "a b", "${IFS}", "\\", "*", "~"]),
)


@settings(max_examples=300)
@given(
    run=NAMES, folder=NAMES, value=HOSTILE, conda=PRINTABLE, kind=st.sampled_from(["slurm", "pbs"]), now=st.booleans()
)
def test_no_name_becomes_a_directive(run: str, folder: str, value: str, conda: str, kind: str, now: bool) -> None:
    raw = {"kind": kind, "conda": conda, "variables": {"V": value}}
    plan = make_plan(raw, 2, f"/runs/{run}", f"/home/{folder}")
    calm = make_plan({"kind": kind}, 2)
    mark = {"slurm": "#SBATCH", "pbs": "#PBS"}[kind]
    job = next(iter(load_launcher(kind).render(plan, now).files.values()))
    expected = next(iter(load_launcher(kind).render(calm, now).files.values()))
    ours = [line for line in job.splitlines() if line.startswith(mark)]
    named = [line for line in ours if "fortyfold-" not in line]
    assert named == [line for line in expected.splitlines() if line.startswith(mark) and "fortyfold-" not in line]
    assert len(ours) - len(named) <= 1


@settings(max_examples=40, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(NAMES, HOSTILE, PRINTABLE), min_size=60, max_size=60))
def test_no_name_is_ever_executed(tmp_path: Path, many: list[tuple[str, str, str]]) -> None:
    """bash runs sixty scripts at once, with functions in the place of what they call that tell what they got."""
    stubs = "cd() { printf '%s\\0' \"$1\"; }\nmodule() { printf '%s\\0' \"$2\"; }\n"
    script, expected = stubs, []
    for name, value, module in many:
        raw = {"kind": "slurm", "modules": [module], "variables": {"V": value}}
        plan = make_plan(raw, 1, f"/runs/{name}", f"/home/{name}")
        script += f"(\n{render_node(plan)})\n".replace("exec /opt/venv/bin/python", "printf '%s\\0' \"$V\"; :")
        expected += [f"/home/{name}", module, value]
    done = subprocess.run(["bash", "-s", "start"], input=script.encode(), cwd=tmp_path, capture_output=True)
    assert done.stderr == b"" and list(tmp_path.iterdir()) == []
    assert done.stdout.decode().split("\0")[:-1] == expected


def test_what_smuggles_a_directive_is_refused() -> None:
    for key, value in [
        ("partition", "main\n#SBATCH --uid=0"), ("account", "a b"), ("lines", ["--x=1\n#SBATCH --y"]),
        ("lines", ["--comment=$(id)"]), ("constraint", "a#b"), ("lines", ["reservation=x"]),
    ]:  # fmt: skip
        with pytest.raises(UserError, match=rf"the test: {key}.*one"):
            parse_site({"kind": "slurm", key: value}, source="the test")


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for request in REQUESTS:
        (GOLDEN / f"{request}.txt").write_text(text_of(render(request)))
        print(request, file=sys.stderr)
