"""Agents on hosts, looked after: each host is a home folder, reached by bash, and its agent a script that plays one."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aws_stand_in import SITE

from fortyfold.launch import over_ssh, remote
from fortyfold.launch.bootstrap import bootstrap
from fortyfold.launch.contract import Rendered
from fortyfold.launch.leading import _tell_of_idle_gpus
from fortyfold.launch.mirroring import require_apart
from fortyfold.launch.over_ssh import start_once, start_until_over
from fortyfold.launch.plan import Plan
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.exit_codes import STOPPED
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.site import SshSite
from fortyfold.spec.site_file import parse_site
from fortyfold.spec.stop import StopFlag

HOSTS = ["gpu1", "gpu2"]
ENDED = """echo '{"ended": "trained"}'\n"""


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder, self.stop, self.said = folder, StopFlag(), list[str]()
        self.run_dir = RunDir(folder / "here" / "run")
        self.run_dir.launch.mkdir(parents=True)

    def plan(self, **keys: Any) -> Plan:
        site = parse_site({"kind": "ssh", "hosts": HOSTS, "shared": False, **keys}, source="the test")
        return Plan("there", site, site.shapes(), Path("~/runs/run"), None, sys.executable, {"verb": "train"})

    def start(self, script: str, plan: Plan | None = None) -> tuple[str, int]:
        """Both hosts run it; $2 is the node's number."""
        rendered = Rendered({Path("node.sh"): f"{script}exit\n"}, [])  # what follows on stdin is no bash
        return start_once(plan or self.plan(), rendered, HOSTS, self.run_dir, self.stop, self.said.append)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    def ssh_command(site: object, host: str, *command: str, **options: object) -> list[str]:
        return ["env", f"HOME={tmp_path / host}", *command]

    for host in HOSTS:
        (tmp_path / host / "runs" / "run").mkdir(parents=True)
    (tmp_path / "gpu1" / "runs" / "run" / "run.json").write_text("{}")
    monkeypatch.setattr(remote, "ssh_command", ssh_command)
    monkeypatch.setattr(over_ssh, "END_SECONDS", 0.5)
    monkeypatch.setattr(over_ssh, "PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(over_ssh, "FETCH_SECONDS", 0.5)
    return Bench(tmp_path)


def test_its_last_word_its_notes_and_all_of_the_run(bench: Bench) -> None:
    """A shell's greeting is nothing that an agent said, whatever it looks like."""
    script = """echo 5; echo welcome; echo '{"note": "for you"}'\n""" + ENDED
    assert bench.start(script) == ("trained", 0)
    assert bench.said == ["note: for you"] and bench.run_dir.spec.read_text() == "{}"


def test_one_that_still_sends_what_it_saved_is_waited_for(bench: Bench) -> None:
    script = """if [ "$2" = 1 ]; then exit; fi\necho '{"keeping": true}'\nsleep 2\n""" + ENDED
    assert bench.start(script) == ("trained", 0)
    silent = script.replace("keeping", "thinking").replace("sleep 2", "sleep 20 < /dev/null > /dev/null 2>&1")
    began = time.monotonic()
    assert bench.start(silent)[0] == "lost" and time.monotonic() - began < 15


def test_an_end_that_cannot_be_fetched(bench: Bench) -> None:
    """From hosts that stay it can be, later; from instances that go now it cannot."""
    lost = replace(bench.plan(), python="/nowhere/python")
    assert bench.start(ENDED, lost) == ("trained", 0)
    (told,) = [line for line in bench.said if "fetched" in line]
    assert told.startswith("note: not all of the run could be fetched (host gpu1: ")
    assert told.endswith("; it is in ~/runs/run")
    cloud = replace(lost, site=parse_site({**SITE, "nodes": 2}, source="the test"))
    with pytest.raises(RunFailed, match=r"^the end of the run is lost: it could not be fetched \(host gpu1"):
        bench.start(ENDED, cloud)
    kept = {**SITE, "nodes": 2, "run_root": "s3://bucket/runs", "instance_profile": "writes-there"}
    bench.said.clear()
    assert bench.start(ENDED, replace(lost, site=parse_site(kept, source="the test"))) == ("trained", 0)
    assert [line for line in bench.said if line.endswith("; it is in s3://bucket/runs")]
    with pytest.raises(RunFailed, match=r"^the end of the run is lost"):
        unkept = """echo '{"unkept": true}'\n""" + ENDED
        bench.start(unkept, replace(lost, site=parse_site(kept, source="the test")))


def test_hosts_that_are_lost_while_it_was_to_stop(bench: Bench) -> None:
    bench.stop.ask_by_name("SIGINT")
    assert start_until_over(lambda: ("lost", 255), bench.run_dir, bench.stop, bench.said.append) == STOPPED


def test_the_folder_here_is_not_the_one_there(bench: Bench) -> None:
    require_apart(bench.plan(), "gpu1", bench.run_dir)
    same = RunDir(bench.folder / "gpu1" / "runs" / "run")
    same.launch.mkdir()
    with pytest.raises(UserError) as caught:
        require_apart(bench.plan(), "gpu1", same)
    assert str(caught.value) == f"{same.path} is ~/runs/run on gpu1, too; write shared = true in the site"
    assert not [*same.launch.iterdir(), *bench.run_dir.launch.iterdir()]


def test_a_host_whose_python_is_too_old_is_named(bench: Bench) -> None:
    old = bench.folder / "gpu1" / "python"
    old.write_text("#!/bin/sh\necho 3 10\n")
    old.chmod(0o755)
    site = bench.plan(bootstrap="wheel", python="~/python").site
    assert isinstance(site, SshSite)
    with pytest.raises(UserError) as caught:
        bootstrap(site, "gpu1", bench.said.append)
    assert str(caught.value) == "host gpu1 has Python 3.10, and 3.11 or newer is needed; see python in the site"
    assert bench.said == []


def test_gpus_that_nobody_uses_are_a_note() -> None:
    told: list[dict[str, Any]] = []
    facts = [{"node": 0, "host": "gpu1", "gpus": 8}, {"node": 1, "host": "gpu2", "gpus": None}]
    _tell_of_idle_gpus(facts, [1, 1], told.append)
    assert told == [{"note": "node 0 (gpu1) has 8 GPUs, and 1 of them will be used; see gpus in the site"}]
