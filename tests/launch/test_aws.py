"""A run on AWS from its question to its end. EC2 is moto's server; what is done by ssh is played by `Hosts`."""

import json
import threading
from itertools import chain
from pathlib import Path
from typing import Any

import boto3
import pytest
from aws_hosts import TRAINED, Hosts, make_site, plan_for, save
from aws_stand_in import REGION, ZONE, Cloud
from botocore.stub import Stubber

from fortyfold.launch.aws import instances
from fortyfold.launch.aws.gang import Work, start_when_there_is_room
from fortyfold.launch.aws.group import make_group
from fortyfold.launch.aws.host_key import HostKey
from fortyfold.launch.aws.lookup import look_up
from fortyfold.launch.aws.session import Client, connect
from fortyfold.launch.aws.tags import RUN, run_tag
from fortyfold.launch.contract import Rendered
from fortyfold.launch.kinds import aws
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.launch.mkdir(parents=True)  # as the command line has done by then
    return made


def test_a_gang_as_it_is_asked_for(ec2: Cloud, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ec2.make_volumes(*(f"imagenet_{number}" for number in range(2, 6)))

    def look(hosts: Hosts) -> tuple[str, int]:
        gang = ec2.instances("running")
        assert len(gang) == 4
        for each in gang:
            assert each["InstanceLifecycle"] == "spot" and each["MetadataOptions"]["HttpTokens"] == "required"
            assert each["Placement"]["AvailabilityZone"] == ZONE
            assert {"Key": RUN, "Value": run_tag(run_dir)} in each["Tags"]
        (group,) = ec2.groups()
        sources = [rule.get("IpRanges") for rule in group["IpPermissions"] if rule.get("IpRanges")]
        assert [[each["CidrIp"] for each in source] for source in sources] == [["203.0.113.7/32"]]
        assert any(pair["GroupId"] == group["GroupId"] for rule in group["IpPermissionsEgress"] for pair in
                   rule["UserIdGroupPairs"])  # fmt: skip
        held = {
            volume["VolumeId"]: volume["Attachments"] for volume in ec2.ec2.describe_volumes(VolumeIds=ids)["Volumes"]
        }
        assert [held[volume][0]["InstanceId"] for volume in ids] == hosts.gangs[0]
        return TRAINED

    hosts = Hosts(ec2, run_dir, look)
    assert hosts.play(monkeypatch, make_site(volume="imagenet", volume_offset=2)) == 0
    assert sorted(hosts.prepared) == [(f"node{node}", f"imagenet_{node + 2}") for node in range(4)]
    assert ec2.left() == [] and ec2.volume_states() == ["available"] * 4


def test_a_spot_notice_brings_a_new_gang(ec2: Cloud, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    ec2.make_volumes(*(f"imagenet_{number}" for number in range(4)))
    hosts = Hosts(ec2, run_dir, save(10, "spot notice"), save(20, "lost", 1), TRAINED)
    assert hosts.play(monkeypatch, make_site(volume="imagenet")) == 0
    assert [len(gang) for gang in hosts.gangs] == [4, 4, 4] and len({*chain(*hosts.gangs)}) == 12
    assert hosts.settled == 3  # each gang is told how far the run is
    assert "note: spot notice; starting again from the last checkpoint" in hosts.said
    assert ec2.left() == [] and len(ec2.instances("terminated")) == 12


def test_gangs_that_save_nothing_are_bounded(ec2: Cloud, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(ec2, run_dir, save(10, "spot notice"), *[("spot notice", 75)] * 3)
    with pytest.raises(RunFailed, match="3 starts in a row have saved nothing new"):
        hosts.play(monkeypatch, make_site())
    assert ec2.left() == []


@pytest.mark.parametrize("word", ["cancelled", "failed", "out of time"])
def test_other_ends_are_ends(ec2: Cloud, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    stop = StopFlag()

    def act(hosts: Hosts) -> tuple[str, int]:
        if word == "out of time":
            stop.ask_by_name("SIGUSR1")
        return word, 75

    hosts = Hosts(ec2, run_dir, act)
    assert hosts.play(monkeypatch, make_site(), stop) == 75
    assert ec2.left() == []


def test_whatever_is_raised_nothing_is_left(ec2: Cloud, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(hosts: Hosts) -> tuple[str, int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Hosts(ec2, run_dir, act).play(monkeypatch, make_site())
    assert ec2.left() == []


def test_a_killed_commands_instances_are_ended_first(
    ec2: Cloud, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(connect(make_site()), plan_for(make_site()), Rendered({}, []), run_dir, StopFlag(), print)
    work.group = make_group(work.ec2, work.tag, ec2.network(), "203.0.113.7")
    start_when_there_is_room(work, look_up(work.ec2, work.site, 4), HostKey("private", "public"))
    assert len(ec2.left()) == 5
    hosts = Hosts(ec2, run_dir, TRAINED)
    assert hosts.play(monkeypatch, make_site()) == 0
    assert len(hosts.gangs[0]) == 4 and ec2.left() == []


def test_the_time_limit_saves_the_run(ec2: Cloud, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, heard = StopFlag(), threading.Event()

    def act(hosts: Hosts) -> tuple[str, int]:
        while not stop.requested:
            heard.wait(0.01)
        return stop.reason, 75

    assert Hosts(ec2, run_dir, act).play(monkeypatch, make_site(time_limit="00:12", warn_seconds=11), stop) == 75
    assert stop.reason == "out of time" and ec2.left() == []


def test_secrets_are_nowhere(ec2: Cloud, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(ec2, run_dir, TRAINED)
    hosts.play(monkeypatch, make_site())
    files = [path.read_text() for path in run_dir.path.rglob("*") if path.is_file()]
    assert files and not any("hush-hush" in text or "PRIVATE KEY" in text for text in [*files, *hosts.said])
    known = run_dir.known_hosts.read_text().split()
    assert known[:2] == ["fortyfold-instance", "ssh-ed25519"]


def test_the_request_is_shown(ec2: Cloud, run_dir: RunDir) -> None:
    rendered = aws.render(plan_for(make_site()), False)
    request = json.loads(next(text for path, text in rendered.files.items() if path.name == "instances.json"))
    assert request["MinCount"] == request["MaxCount"] == 4
    assert request["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert rendered.commands[3][-4:] == ["--", "0", "3", "4"]


def test_a_missing_volume(ec2: Cloud, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    ec2.make_volumes("imagenet_0", "imagenet_1", "imagenet_2")
    with pytest.raises(UserError, match=r"^AWS: there is no volume imagenet_3; `fortyfold aws volumes` makes"):
        Hosts(ec2, run_dir).play(monkeypatch, make_site(volume="imagenet"))
    assert ec2.instances() == [] and ec2.groups() == []


def play_room(monkeypatch: pytest.MonkeyPatch, *rooms: bool) -> None:
    """Whether there is room, one time after the other."""
    start, left = instances.start_instances, list(rooms)

    def start_instances(*arguments: Any) -> list[str]:
        if not left.pop(0):
            raise instances.NoRoom("AWS: no room")
        return start(*arguments)

    monkeypatch.setattr(instances, "start_instances", start_instances)


def test_a_run_that_has_begun_waits_for_room(ec2: Cloud, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    play_room(monkeypatch, True, False, False, True)
    hosts = Hosts(ec2, run_dir, save(10, "spot notice"), TRAINED)
    assert hosts.play(monkeypatch, make_site()) == 0
    assert hosts.said.count("note: AWS: no room; asking again for 30 minutes") == 1


def test_a_new_run_does_not_wait(ec2: Cloud, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    play_room(monkeypatch, False)
    with pytest.raises(UserError, match=r"^AWS: no room$"):
        Hosts(ec2, run_dir).play(monkeypatch, make_site())
    assert ec2.left() == []


def test_instances_that_vanish_are_replaced(ec2: Cloud, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def vanish(hosts: Hosts) -> tuple[str, int]:
        ec2.ec2.terminate_instances(InstanceIds=hosts.gangs[0][1:2])
        raise RunFailed("host node1: it talks nonsense")

    hosts = Hosts(ec2, run_dir, vanish, TRAINED)
    assert hosts.play(monkeypatch, make_site()) == 0
    assert "note: instances were lost: host node1: it talks nonsense" in hosts.said
    with pytest.raises(RunFailed, match=r"^host node1: a bug$"):
        Hosts(ec2, run_dir, fail).play(monkeypatch, make_site())
    assert ec2.left() == []


def fail(hosts: Hosts) -> tuple[str, int]:
    raise RunFailed("host node1: a bug")


def test_credentials_that_expire_meanwhile(ec2: Cloud, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances that EC2 does not end for us are told to end themselves."""
    client = boto3.client("ec2", region_name=REGION)
    monkeypatch.setattr(aws, "connect", lambda site: Client(client))
    stub = Stubber(client)

    def act(hosts: Hosts) -> tuple[str, int]:
        for operation in ("terminate_instances", "describe_instances"):
            stub.add_client_error(operation, "RequestExpired", "Request has expired.")
        stub.activate()
        return TRAINED

    hosts = Hosts(ec2, run_dir, act)
    assert hosts.play(monkeypatch, make_site()) == 0
    stub.deactivate()
    assert hosts.by_ssh == [(f"node{node}", "sudo -n shutdown -h now\n") for node in range(4)]
    assert any(line.startswith("note: AWS: terminate_instances: RequestExpired") for line in hosts.said)
    assert any("`fortyfold aws reap cloud` does it" in line for line in hosts.said)
