"""Sites: from TOML to what each node is asked for; every mistake is one line that says where and what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fortyfold.spec.errors import UserError
from fortyfold.spec.nodes import Gpus, NodeShape, clock_text, memory_text, parse_gpus, parse_memory, parse_seconds
from fortyfold.spec.site_file import find_sites, load_site, parse_site

CLUSTER = {"kind": "slurm", "gpus": "v100:4", "cpus": 16, "memory": "64gb", "time_limit": "1:00:00"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"partitoin": "gpu"}, "unknown key partitoin; did you mean partition?"),
        ({"queue": "gpu"}, "unknown key queue; did you mean partition?"),  # PBS's
        ({"gpus": "v100"}, "gpus: 'v100' is neither a count of GPUs nor type and count"),
        ({"memory": "64"}, "memory: '64' is no amount of memory"),
        ({"time_limit": "1h"}, "time_limit: '1h' is no time limit"),
        ({"nodes": 0}, "nodes: "),
        ({"conda": "a", "venv": "b"}, "conda and venv exclude each other"),
        ({"variables": {"WANDB_API_KEY": "x"}}, "WANDB_API_KEY looks like a secret"),
        ({"variables": {"A-B": "x"}}, "'A-B' is no name of an environment variable"),
        ({"binds": ["/data"]}, "binds is for a container"),
        ({"lines": ["--array=0-3"]}, "--array=0-3 is not for lines"),
        ({"lines": ["--arr=0-3"]}, "--arr=0-3 is not for lines"),
        ({"lines": ["-a0-3"]}, "-a0-3 is not for lines"),
        ({"lines": ["--reservation=x --array=0-3"]}, "is not one option"),
        ({"lines": ["--gres=gpu:4"]}, "--gres=gpu is not for lines: use gpus"),
        ({"lines": ["--time=10:00"]}, "--time=10:00 is not for lines: use time_limit"),
        ({"time_limit": "2:00"}, 'time_limit "2:00" is 120 s, of which warn_seconds (180) leaves nothing'),
        ({"time_limit": 60}, 'time_limit: 60 is not text such as "1:00:00"'),
        ({"ports": [40000, 30000]}, "ports: [40000, 30000] are not two ports or more"),
        ({"run_root": "s3://bucket/runs"}, "run_root is a folder, and s3://bucket/runs is not; only kind aws"),
        ({"run_root": "fs-0a1b:/runs"}, "run_root is a folder, and fs-0a1b:/runs is not; only kind aws"),
        ({"run_root": "s3:/bucket/runs"}, "run_root is a folder, and s3:/bucket/runs is not"),
        ({"run_root": "$SCRATCH/runs"}, "run_root holds a variable, and only scratch has them filled in"),
        ({"container": "${HOME}/x.sif"}, "container holds a variable"),
        ({"hosts": ["a"]}, "unknown key hosts; it is for kind ssh"),
        ({"walltime": "1:00:00"}, "unknown key walltime; did you mean time_limit?"),
        ({"gpus": "v100:0"}, "gpus: 'v100:0' is neither a count of GPUs"),
        ({"kind": ["slurm"]}, "there is no kind ['slurm']"),
        ({"kind": "pbs", "secrets": ["HF_TOKEN"], "gpus": 4}, "PBS shows the variables of a job to everybody"),
        ({"modules": ["a\nb"]}, "modules.0: must be printable text"),
        ({"groups": [{"gpus": 2}], "nodes": 2}, "groups count the nodes"),
        ({"kind": "slrum"}, "there is no kind 'slrum'; there are: local, ssh, slurm, pbs"),
    ],
)
def test_mistakes_are_one_line(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_site({**CLUSTER, **change}, source="sites.toml, site cluster")
    assert str(caught.value).startswith("sites.toml, site cluster: ") and "\n" not in str(caught.value)
    assert told in str(caught.value)


def test_what_each_node_is_asked_for() -> None:
    site = parse_site(CLUSTER, source="test")
    assert site.shapes() == (NodeShape(4, Gpus(4, "v100"), 16, 65536),)
    assert site.shapes(nodes=2, procs=1) == (NodeShape(1, Gpus(4, "v100"), 16, 65536),) * 2
    with pytest.raises(ValueError, match="8 processes on a node of 4 GPUs"):
        site.shapes(procs=8)
    uneven = parse_site({**CLUSTER, "groups": [{"nodes": 2}, {"gpus": 1, "memory": "1gb"}]}, source="test")
    assert [shape.procs for shape in uneven.shapes()] == [4, 4, 1]
    assert uneven.shapes()[2].memory_mib == 1024 and uneven.shapes(nodes=3) == uneven.shapes()
    with pytest.raises(ValueError, match="its groups have 3 nodes, not 2"):
        uneven.shapes(nodes=2)


def test_how_amounts_are_written() -> None:
    assert parse_gpus(3) == Gpus(3) and str(parse_gpus("a100:2")) == "a100:2"
    assert [parse_memory(text) for text in ("250gb", "64G", "500mb", "1T")] == [256000, 65536, 500, 1048576]
    assert memory_text(256000) == (250, "g") and memory_text(500) == (500, "m")
    assert [parse_seconds(text) for text in ("30:00", "0:20:00", "2-01:00:00")] == [1800, 1200, 176400]
    assert clock_text(176400) == "49:00:00"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes the project's sites and the user's."""
    config = tmp_path / "config" / "fortyfold"
    config.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)

    def write(project: str, user: str) -> None:
        (tmp_path / "sites.toml").write_text(project)
        (config / "sites.toml").write_text(user)

    return write


def test_the_projects_site_comes_before_the_users(
    files: Callable[[str, str], None], fortyfold: Callable[..., tuple[int, str, str]]
) -> None:
    files('[a]\nkind = "slurm"\nnodes = 2\n[wrong]\nkind = "pbs"\nnods = 1\n', '[a]\nkind = "pbs"\n[b]\nkind = "pbs"\n')
    assert (
        load_site("a").nodes == 2 and load_site("b").kind == "pbs" and set(find_sites()) == {"local", "a", "b", "wrong"}
    )
    code, out, _ = fortyfold("sites")
    assert code == 0 and "wrong: sites.toml, site wrong: unknown key nods; did you mean nodes?" in out
    code, out, _ = fortyfold("sites", "show", "a", "--explain")
    assert code == 0 and "# Slurm's --partition.\n" in out
    code, _, err = fortyfold("train", "tiny", "--on", "c")
    assert code == 2 and "no site 'c'; sites are written in sites.toml and " in err
    code, _, err = fortyfold("train", "tiny", "--nodes", "2")
    assert code == 2 and "are for a site other than this machine (--on)" in err


def test_what_is_no_site(files: Callable[[str, str], None], fortyfold: Callable[..., tuple[int, str, str]]) -> None:
    files('kind = "slurm"\n', "")
    assert "kind stands outside of a site" in fortyfold("sites")[2]
    files("[a\n", "")
    code, _, err = fortyfold("sites")
    assert code == 2 and "cannot read sites.toml" in err
