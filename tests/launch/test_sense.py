"""Mistakes that are found before a run is handed over, and a hand-over that fails."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fortyfold.cli import following
from fortyfold.launch import over_ssh
from fortyfold.launch.contract import Job, find_job
from fortyfold.launch.kinds import slurm
from fortyfold.spec.errors import UserError
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.site_file import load_site

Fortyfold = Callable[..., tuple[int, str, str]]
SITES = """
[cluster]
kind = "slurm"
gpus = 4
nodes = 2
secrets = ["HUSH"]
venv = "~/nowhere"
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fortyfold: Fortyfold) -> Callable[..., tuple[int, str, str]]:
    """In a folder with a site, and an sbatch that does as the file `answer` says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HUSH", "x")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "sites.toml").write_text(SITES)
    (tmp_path / "answer").write_text("echo 7")
    for tool in ("sbatch", "squeue"):
        (tmp_path / tool).write_text("#!/bin/sh\n. ./answer\n")
        (tmp_path / tool).chmod(0o755)
    return lambda *options: fortyfold("train", "tiny", "--on", "cluster", *options)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("schedule.name=none", "no schedule 'none'; there are: "),
        ("strategy.name=gosip", "no strategy 'gosip'; there are: allreduce, gossip, localsgd; did you mean gossip?"),
        ("strategy={ name = 'gossip', topology = 'rng' }", "did you mean ring?"),
        ('log.sinks=["wandbb"]', "did you mean wandb?"),
        ("global_batch=7", "global_batch 7 is less than an image for each of 8 ranks"),
    ],
)
def test_what_would_fail_on_the_nodes_fails_here(train: Fortyfold, change: str, told: str) -> None:
    for options in ([], ["--dry-run"]):
        code, out, err = train("--set", change, *options)
        assert (code, out, err.count("\n")) == (2, "", 1) and told in err
    assert not Path("runs").exists()


def test_a_secret_that_is_not_set(train: Fortyfold, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HUSH")
    assert "names the secret HUSH, and it is not set here" in train()[2]


def test_what_is_not_seen_from_here_is_a_note(train: Fortyfold) -> None:
    code, out, err = train()
    assert code == 0 and "as job 7: 2 nodes of 4 processes" in out
    assert err == "note: venv ~/nowhere is not seen from here; the nodes must see it\n"


def test_a_scheduler_that_refuses_leaves_everything_as_it_was(train: Fortyfold) -> None:
    Path("answer").write_text("echo no such partition >&2; exit 1")
    code, _, err = train()
    assert code == 2 and "no such partition" in err and not Path("runs/tiny").exists()
    Path("runs/tiny").mkdir()
    Path("runs/tiny/run.json").write_text("{}")
    code, out, _ = train("--fresh")
    assert code == 2 and "again" in out
    assert [path.name for path in Path("runs").iterdir()] == ["tiny"] and Path("runs/tiny/run.json").exists()


def test_a_scheduler_that_does_not_answer_says_nothing_of_the_job(
    train: Fortyfold, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train()[0] == 0
    run_dir = RunDir(Path("runs/tiny"))
    Path("answer").write_text("echo RUNNING None")
    watching = following.Watch(run_dir)
    assert watching.state() == "running"
    Path("answer").write_text("echo Unable to contact slurm controller >&2; exit 1")
    for command in ([], ["--fresh"]):
        code, _, err = train(*command)
        assert code == 2 and "whether job 7 still runs cannot be told" in err
    assert fortyfold("stop", "tiny")[0] == 2
    monkeypatch.setattr(following, "ASK_SECONDS", -1.0)
    assert watching.state() == "running" and not watching.is_over()
    Path("answer").write_text("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    assert watching.is_over()


def test_a_run_in_an_allocation_is_found_by_what_its_script_noted(train: Fortyfold) -> None:
    assert train()[0] == 0
    run_dir = RunDir(Path("runs/tiny").absolute())
    run_dir.job.unlink()
    assert find_job(run_dir) is None
    run_dir.job_id.write_text("3_1\n")
    job = find_job(run_dir)
    assert job is not None and (job.id, job.kind, job.log) == ("3_1", "slurm", str(run_dir.logs / "job-3_1.log"))
    assert slurm.shell(job, 1, "")[-2:] == ["--pty", "bash"]
    assert slurm.shell(job, 1, "exec x")[-3:] == ["bash", "-c", "exec x"]


def test_a_command_on_another_machine_shows_life(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("ssh", "7@elsewhere", "lab", "", 0.0, alive=1000.0)
    monkeypatch.setattr(time, "time", lambda: 1100.0)
    assert over_ssh.state(job) == "looked after by process 7@elsewhere"
    monkeypatch.setattr(time, "time", lambda: 1200.0)
    assert over_ssh.state(job) is None


def test_local_is_this_machine(train: Fortyfold, fortyfold: Fortyfold) -> None:
    assert "no site ''" in fortyfold("train", "tiny", "--on", "")[2]
    Path("sites.toml").write_text('[here]\nkind = "local"\nconda = "x"\n')
    assert "conda does nothing on this machine" in fortyfold("train", "tiny", "--on", "here")[2]
    Path("sites.toml").write_text('[local]\nkind = "slurm"\n')
    with pytest.raises(UserError, match="local is this machine"):
        load_site("local")
