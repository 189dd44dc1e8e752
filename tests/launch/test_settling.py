"""Before a start hosts without a shared disk and this machine agree: each host is a home folder, reached by bash."""

import json
import sys
from pathlib import Path

import pytest

from fortyfold.launch import remote
from fortyfold.launch.mirroring import settle
from fortyfold.launch.plan import Plan
from fortyfold.spec.errors import UserError
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.site_file import parse_site

HOSTS = ["gpu1", "gpu2"]


@pytest.fixture
def run_dirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunDir, RunDir, RunDir]:
    """This machine's, and each host's."""

    def ssh_command(site: object, host: str, *command: str, **options: object) -> list[str]:
        return ["env", f"HOME={tmp_path / host}", *command]

    monkeypatch.setattr(remote, "ssh_command", ssh_command)
    here, first, second = (RunDir(tmp_path / place / "run") for place in ("here", "gpu1/runs", "gpu2/runs"))
    return here, first, second


def make(run_dir: RunDir, name: str, attempt: int, events: str, *steps: int) -> None:
    run_dir.path.mkdir(parents=True)
    run_dir.spec.write_text(json.dumps({"id": name, "attempt": attempt}))
    run_dir.events().write_text(events)
    for step in steps:
        folder = run_dir.checkpoint(step, 1)
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(f"{step}")


def agree(run_dir: RunDir) -> list[str]:
    """Gives what is said."""
    site = parse_site({"kind": "ssh", "hosts": HOSTS, "shared": False}, source="the test")
    plan = Plan("there", site, site.shapes(), Path("~/runs/run"), None, sys.executable, {})
    said: list[str] = []
    settle(plan, HOSTS, run_dir, lambda: None, said.append)
    return said


def test_another_run_of_that_name_is_refused_and_nothing_is_touched(run_dirs: tuple[RunDir, RunDir, RunDir]) -> None:
    here, there, other = run_dirs
    make(here, "mine", 1, "here", 3)
    make(there, "theirs", 5, "there", 7)
    with pytest.raises(UserError) as caught:
        agree(here)
    told = f"~/runs/run on gpu1 is another run than {here.path}; --fresh sets both aside, --out gives another name"
    assert str(caught.value) == told
    assert here.events().read_text() == "here" and here.checkpoint_names() == ["step-000000003-0001"]
    assert there.events().read_text() == "there" and not other.path.exists()


def test_what_a_host_has_not_heard_of_it_is_told(run_dirs: tuple[RunDir, RunDir, RunDir]) -> None:
    """A host may have it from a copy that was a little behind."""
    here, there, other = run_dirs
    make(here, "it", 2, "one two three", 3)
    make(there, "it", 2, "one", 2, 3)
    agree(here)
    for run_dir in run_dirs:
        assert run_dir.events().read_text() == "one two three"
    assert here.checkpoint_names() == there.checkpoint_names() == ["step-000000003-0001", "step-000000002-0001"]
    assert not other.checkpoints.exists()


def test_the_newest_checkpoint_wins_wherever_it_is(run_dirs: tuple[RunDir, RunDir, RunDir]) -> None:
    here, there, _ = run_dirs
    make(here, "it", 2, "one", 5)
    make(there, "it", 2, "one two", 3)
    agree(here)
    assert there.checkpoint_names()[0] == "step-000000005-0001" and here.events().read_text() == "one two"


def test_the_later_attempt_holds(run_dirs: tuple[RunDir, RunDir, RunDir]) -> None:
    here, there, _ = run_dirs
    make(here, "it", 3, "one two", 5)
    assert agree(here) == []
    assert there.read_attempt() == 3 and there.checkpoint_names() == here.checkpoint_names()
    there.spec.write_text(json.dumps({"id": "it", "attempt": 4}))
    agree(here)
    assert here.read_attempt() == 4


def test_one_that_is_new_here_is_told_of(run_dirs: tuple[RunDir, RunDir, RunDir]) -> None:
    here, there, _ = run_dirs
    make(there, "it", 1, "one", 5)
    told = "this is the run that there is in ~/runs/run on gpu1; --fresh sets it aside, --out gives another name"
    assert agree(here) == [f"note: {told}"] and here.read_id() == "it"
