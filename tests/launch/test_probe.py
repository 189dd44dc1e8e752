"""What is wrong with a node is found and named."""

import resource
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from fortyfold.launch import probe as probing
from fortyfold.launch.attempt import free_port
from fortyfold.launch.check import find_problems
from fortyfold.launch.network import interface_towards, interfaces, own_addresses
from fortyfold.launch.place import Place, count_gpus, find_place
from fortyfold.launch.plan import Plan, make_plan
from fortyfold.launch.probe import probe
from fortyfold.spec.errors import UserError
from fortyfold.spec.site_file import parse_site


def plan_of(folder: Path, nodes: int = 2, data: str | None = None, **keys: Any) -> Plan:
    site = parse_site({"kind": "slurm", "interface": "lo", **keys}, source="test")
    job = {"verb": "check", "run": str(folder / "runs" / "x"), "data": data, "staged": None}
    return make_plan("there", site, folder / "runs" / "x", job, nodes, None)


def problems(plan: Plan, num_gpus: int | None = None) -> list[str]:
    return probe(plan, plan.shapes[0].procs, num_gpus)


def test_a_sound_node_has_none(tmp_path: Path, tiny_data: Path) -> None:
    assert problems(plan_of(tmp_path, data=str(tiny_data), scratch=str(tmp_path / "scratch"))) == []


def test_a_wrong_interface(tmp_path: Path) -> None:
    (told,) = problems(plan_of(tmp_path, interface="ib7"))
    assert "has no network interface ib7 with an address; it has: lo" in told


def test_taken_ports(tmp_path: Path) -> None:
    with ExitStack() as servers:
        first = servers.enter_context(socket.create_server(("", 0))).getsockname()[1]
        last = first + 1
        with suppress(OSError):  # it may be taken by somebody else, which will do as well
            servers.enter_context(socket.create_server(("", last)))
        (told,) = problems(plan_of(tmp_path, ports=[first, last]))
        assert f"all ports from {first} to {last} are taken" in told
    assert free_port((first, first)) == first


def test_too_little_shared_memory_and_too_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "SHM_BYTES_A_PROCESS", 2**60)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 2048))
    shm, files = problems(plan_of(tmp_path))
    assert f"{probing.SHM} has " in shm and "enlarge it" in shm
    assert files == "only 2048 files may be open at once; ask for a hard limit of 4096 (ulimit -Hn)"
    monkeypatch.setattr(probing, "SHM", tmp_path / "none")
    assert "none: No such file or directory" in problems(plan_of(tmp_path))[0]


def test_folders_that_cannot_be_written_or_are_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").write_text("a file")
    (told,) = problems(plan_of(tmp_path))
    assert told == f"run_root {tmp_path / 'runs'} cannot be written: File exists"
    (told,) = problems(plan_of(tmp_path / "a", scratch="$NOT_SET/x"))
    assert told == 'scratch = "$NOT_SET/x": the environment variable NOT_SET is not set'
    monkeypatch.setattr(probing, "SPACE_BYTES", 2**60)
    assert [line.partition(" has only ")[0] for line in problems(plan_of(tmp_path / "b"))] == [
        f"run_root {tmp_path / 'b' / 'runs'}"
    ]


def test_data_that_is_not_there(tmp_path: Path) -> None:
    (told,) = problems(plan_of(tmp_path, data=str(tmp_path / "imagenet")))
    assert told.startswith(f"the data in {tmp_path / 'imagenet'} cannot be read: ")


def test_gpus_that_are_missing(tmp_path: Path) -> None:
    assert problems(plan_of(tmp_path, gpus=4), num_gpus=1) == ["1 GPUs are seen, and 4 were asked for"]
    unequal = [{"gpus": 2}, {"gpus": 1}]  # in which order is Slurm's choice
    assert problems(plan_of(tmp_path, groups=unequal), num_gpus=1) == []


def test_all_nodes_problems_are_told_by_name(tmp_path: Path) -> None:
    same: dict[str, Any] = {"versions": {"torch": "1"}, "decoder": "x", "gpus": None, "problems": []}
    nodes = [same | {"node": 0, "host": "a"}, same | {"node": 1, "host": "b", "problems": ["no disk", "no luck"]}]
    assert find_problems(plan_of(tmp_path), nodes) == ["node 1 (b): no disk", "node 1 (b): no luck"]
    nodes[1] |= {"problems": [], "versions": {"torch": "2"}}
    assert "node 1 (b) has torch 2, and node 0 (a) 1" in find_problems(plan_of(tmp_path), nodes)[0]


def test_where_a_node_is_by_its_scheduler() -> None:
    slurm = {"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "3", "SLURM_GPUS_ON_NODE": "2"}
    assert find_place("slurm", slurm) == Place(1, 3, 2)
    assert find_place(
        "pbs", {"FORTYFOLD_NODE": "0", "FORTYFOLD_NODES": "2", "CUDA_VISIBLE_DEVICES": "GPU-a,MIG-b"}
    ) == (Place(0, 2, 2))
    assert count_gpus(None, {"CUDA_VISIBLE_DEVICES": ""}) == 0
    with pytest.raises(UserError, match="SLURM_NODEID is ''"):
        find_place("slurm", {})


def test_addresses_and_interfaces() -> None:
    assert interfaces()["lo"] == "127.0.0.1"
    assert own_addresses("lo") == ["127.0.0.1"] and interface_towards("127.0.0.1") == "lo"
    for address in interfaces().values():
        if not address.startswith("127."):
            assert address in own_addresses(None) and interfaces()[interface_towards(address)] == address
