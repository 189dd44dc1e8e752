"""The instances of a run as the launcher sees them by ssh: no host is there, and acts of a play are what happens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aws_stand_in import SITE, Cloud

from fortyfold.launch import remote
from fortyfold.launch.aws import gang
from fortyfold.launch.contract import Rendered
from fortyfold.launch.environment import train_job
from fortyfold.launch.kinds import aws
from fortyfold.launch.plan import Plan, make_plan
from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.recipe_file import load_recipe
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.site_file import parse_site
from fortyfold.spec.stop import StopFlag

Act = Callable[["Hosts"], tuple[str, int]]
TRAINED = ("trained", 0)


def make_site(**keys: Any) -> AwsSite:
    site = parse_site(SITE | keys, source="test")
    assert isinstance(site, AwsSite)
    return site


def plan_for(site: AwsSite) -> Plan:
    there = Path("~/runs/run")
    job = train_job(load_recipe("tiny"), there, ["fortyfold", "train"])
    return make_plan("cloud", site, there, job, None, None)


class Hosts:
    """What happens on the instances: `acts` one after the other, a gang each."""

    def __init__(self, ec2: Cloud, run_dir: RunDir, *acts: Act | tuple[str, int]) -> None:
        self.ec2, self.run_dir, self.acts = ec2, run_dir, list(acts)
        self.gangs: list[list[str]] = []
        self.prepared: list[tuple[str, str | None]] = []
        self.settled = 0
        self.said: list[str] = []
        self.by_ssh: list[tuple[str, str]] = []

    def play(self, monkeypatch: pytest.MonkeyPatch, site: AwsSite, stop: StopFlag | None = None) -> int:
        """The launcher's run, on these hosts; gives its exit code."""
        self.take_over(monkeypatch)
        plan = plan_for(site)
        return aws.run(plan, aws.render(plan, False), self.run_dir, stop or StopFlag(), self.said.append)

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on what the launcher does by ssh is done here."""

        def prepare(site: AwsSite, host: str, volume: Any, say: object) -> None:
            self.prepared.append((host, volume and volume.name))

        def settle(*arguments: object) -> None:
            self.settled += 1

        def remote_run(site: AwsSite, host: str, script: str) -> bytes:
            self.by_ssh.append((host, script))
            return b""

        monkeypatch.setattr(gang, "await_sshd", lambda site, host: None)
        monkeypatch.setattr(gang, "prepare_host", prepare)
        monkeypatch.setattr(gang, "settle", settle)
        monkeypatch.setattr(aws, "start_once", self._start_once)
        monkeypatch.setattr(remote, "run", remote_run)

    def _start_once(self, plan: Plan, rendered: Rendered, hosts: Any, *rest: object) -> tuple[str, int]:
        running = self.ec2.instances("running")
        self.gangs.append([each["InstanceId"] for each in running])
        assert isinstance(plan.site, AwsSite) and plan.site.config == str(self.run_dir.ssh_config)
        text = self.run_dir.ssh_config.read_text()
        assert all(f"HostName {each['PublicIpAddress']}\n" in text for each in running)
        assert list(hosts) == [f"node{node}" for node in range(len(running))]
        act = self.acts.pop(0)
        return act if isinstance(act, tuple) else act(self)


def save(step: int, word: str, code: int = 75) -> Act:
    def act(hosts: Hosts) -> tuple[str, int]:
        (hosts.run_dir.checkpoints / f"step-{step:09d}-0001").mkdir(parents=True, exist_ok=True)
        return word, code

    return act
