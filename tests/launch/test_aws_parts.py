"""The launcher's parts one by one; botocore's Stubber plays what moto gets wrong: refusals, delays, expired words."""

import json
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("moto")
import boto3
from aws_stand_in import REGION, SITE, Metadata, metadata
from botocore.stub import ANY, Stubber

from fortyfold.launch import spot
from fortyfold.launch.aws import group, instances, lookup, reaping, volumes
from fortyfold.launch.aws.asking import instances_request, user_data
from fortyfold.launch.aws.data_volumes import make_volumes
from fortyfold.launch.aws.host_key import HostKey, make_host_key, render_ssh_config
from fortyfold.launch.aws.lookup import Found, Image, Subnet, Volume, find_volumes
from fortyfold.launch.aws.preview import describe
from fortyfold.launch.aws.session import AwsError, Client
from fortyfold.launch.aws.volumes import mount_script, runs_script
from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import UserError
from fortyfold.spec.site_file import parse_site
from fortyfold.spec.stop import StopFlag

SUBNETS = (Subnet("subnet-a", "us-east-1a", "vpc-1"), Subnet("subnet-b", "us-east-1b", "vpc-1"))
FOUND = Found(Image("ami-1", "Deep Learning", "/dev/sda1"), SUBNETS, ())
GOLDEN = Path(__file__).parents[1] / "golden"
FULL = "InsufficientInstanceCapacity"


def make_site(**keys: Any) -> AwsSite:
    site = parse_site(SITE | keys, source="test")
    assert isinstance(site, AwsSite)
    return site


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubber]:
    for module in (instances, reaping, volumes):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.0)
    client = boto3.client("ec2", region_name=REGION, aws_access_key_id="id", aws_secret_access_key="hush")  # noqa: S106
    with Stubber(client) as made:
        yield made
        made.assert_no_pending_responses()


def start(stub: Stubber) -> list[str]:
    return instances.start_instances(Client(stub.client), make_site(), FOUND, 4, "sg-1", "data", {"Name": "x"})


def expected_request(subnet: str) -> dict[str, Any]:
    return instances_request(make_site(), 4, FOUND.image, subnet, "sg-1", "data", {"Name": "x"}) | {"ClientToken": ANY}


def made(*places: int) -> dict[str, Any]:
    return {"Instances": [{"InstanceId": f"i-{place}", "AmiLaunchIndex": place} for place in places]}


def described(**states: str) -> dict[str, Any]:
    """Instances of these states, all with an address."""
    found = [
        {
            "InstanceId": f"i-{name[1:]}",
            "State": {"Name": state},
            "StateReason": {"Message": "Server.SpotInstanceTermination"},
            "PublicIpAddress": f"198.51.100.{name[1:]}",
        }
        for name, state in states.items()
    ]
    return {"Reservations": [{"Instances": found}]}


def test_a_full_zone_is_passed_over(stub: Stubber) -> None:
    stub.add_client_error("run_instances", FULL, "no", 500, expected_params=expected_request("subnet-a"))
    stub.add_response("run_instances", made(2, 0, 3, 1), expected_request("subnet-b"))
    assert start(stub) == ["i-0", "i-1", "i-2", "i-3"]


def test_no_room_anywhere(stub: Stubber) -> None:
    for _ in SUBNETS:
        stub.add_client_error("run_instances", FULL, "We currently do not have sufficient capacity.")
    with pytest.raises(instances.NoRoom) as caught:
        start(stub)
    assert str(caught.value) == (
        f"AWS: no room for 4 spot instances of p3.16xlarge together (us-east-1a: {FULL}, us-east-1b: {FULL}); "
        "try later, or another region or instance_type"
    )


def test_any_other_refusal_is_final(stub: Stubber) -> None:
    blob = "You are not authorized. Encoded authorization failure message: 4Gw9..."
    stub.add_client_error("run_instances", "UnauthorizedOperation", blob)
    with pytest.raises(AwsError) as caught:
        start(stub)
    assert str(caught.value) == (
        "AWS: run_instances: UnauthorizedOperation: You are not authorized; the account's administrator has to allow it"
    )


def test_an_expired_credential_is_one_line(stub: Stubber) -> None:
    stub.add_client_error("describe_volumes", "RequestExpired", "Request has\nexpired.")
    with pytest.raises(UserError) as caught:
        find_volumes(Client(stub.client), make_site(volume="imagenet"), 1)
    line = "AWS: describe_volumes: RequestExpired: Request has expired; the credentials have expired; log in again"
    assert str(caught.value).startswith(line)


def test_instances_take_their_time(stub: Stubber) -> None:
    pending, running = described(_0="pending", _1="running"), described(_1="running", _0="running")
    for answer in (described(), pending, running):
        stub.add_response("describe_instances", answer, {"Filters": ANY})
    addresses = instances.await_running(Client(stub.client), ["i-0", "i-1"], lambda: None, private=False)
    assert addresses == ["198.51.100.0", "198.51.100.1"]


def test_instances_may_be_lost_at_once(stub: Stubber) -> None:
    stub.add_response("describe_instances", described(_0="running", _1="shutting-down"))
    with pytest.raises(instances.InstancesLost, match=r"^instance i-1 ended at once: Server\.SpotInstanceTermination$"):
        instances.await_running(Client(stub.client), ["i-0", "i-1"], lambda: None, private=False)


def test_the_end_is_awaited(stub: Stubber) -> None:
    stub.add_response("terminate_instances", {}, {"InstanceIds": ["i-0"]})
    stub.add_response("describe_instances", described(_0="shutting-down"))
    stub.add_response("describe_instances", described(_0="terminated"))
    instances.end_instances(Client(stub.client), ["i-0"])


def test_a_group_goes_when_nothing_is_in_it(stub: Stubber) -> None:
    stub.add_client_error("delete_security_group", "DependencyViolation", "has a dependent object")
    stub.add_response("delete_security_group", {}, {"GroupId": "sg-1"})
    reaping._delete_group(Client(stub.client), "sg-1")


def volume(number: int, name: str = "", zone: str = "us-east-1a") -> dict[str, Any]:
    tags = [{"Key": "Name", "Value": name or f"imagenet_{number}"}]
    return {"VolumeId": f"vol-{number}", "AvailabilityZone": zone, "State": "available", "Size": 10, "Tags": tags}


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        ([volume(0)], "there is no volume imagenet_1"),
        ([volume(0), volume(1), volume(2, "imagenet_1")], "2 volumes are called imagenet_1: vol-1 vol-2"),
        ([volume(0), volume(1, zone="us-east-1b")], "are in us-east-1a and us-east-1b, not in one zone"),
    ],
)
def test_volumes_must_be_clear(stub: Stubber, found: list[dict[str, Any]], complaint: str) -> None:
    stub.add_response("describe_volumes", {"Volumes": found})
    with pytest.raises(UserError, match=complaint):
        find_volumes(Client(stub.client), make_site(volume="imagenet"), 2)


def test_volumes_fix_the_zone() -> None:
    assert lookup._near(SUBNETS, [Volume("vol-0", "x_0", "us-east-1b", "available", 1)]) == SUBNETS[1:]
    with pytest.raises(UserError, match="the volumes are in us-east-1c, and no subnet of the site is"):
        lookup._near(SUBNETS, [Volume("vol-0", "x_0", "us-east-1c", "available", 1)])


def test_a_volume_that_is_let_go_late(stub: Stubber) -> None:
    wanted = [Volume("vol-0", "imagenet_0", "us-east-1a", "in-use", 10)]
    stub.add_response("describe_volumes", {"Volumes": [volume(0) | {"State": "in-use"}]})
    stub.add_response("describe_volumes", {"Volumes": [volume(0)]})
    volumes.await_available(Client(stub.client), wanted, lambda: None)


def test_all_volumes_or_none(stub: Stubber) -> None:
    stub.add_response("create_volume", {"VolumeId": "vol-0"})
    stub.add_client_error("create_volume", "VolumeLimitExceeded", "no more")
    stub.add_response("delete_volume", {}, {"VolumeId": "vol-0"})
    with pytest.raises(UserError, match="VolumeLimitExceeded"):
        make_volumes(Client(stub.client), ["data_0", "data_1"], "us-east-1a", "snap-1", None, 4000)


def test_the_question() -> None:
    found = Found(FOUND.image, SUBNETS[:1], (Volume("vol-0", "imagenet_0", "us-east-1a", "available", 600),))
    site = make_site(
        volume="imagenet",
        fill="s3://bucket/imagenet",
        instance_profile="reads",
        hourly_price=7.5,
        time_limit="12:00:00",
    )
    assert describe(site, 4, found, "203.0.113.7", "run-1").splitlines() == [
        "to be made in us-east-1a, with the tag fortyfold-run=run-1:",
        "  4 × p3.16xlarge, spot, of ami-1 Deep Learning",
        "  1 security group: ssh from 203.0.113.7 only",
        "attached meanwhile: imagenet_0, 600 GiB in all, read-only at /data",
        "  filled from s3://bucket/imagenet if empty",
        "all ends after 12 h at the latest; 4 × 7.50 = 30.00 an hour, at most 360.00 in all",
    ]
    assert "the first of us-east-1a, us-east-1b with room" in describe(make_site(), 4, FOUND, "203.0.113.7", "run-1")


def test_the_request_is_golden() -> None:
    site = make_site(disk_gib=200, instance_profile="reads", security_groups=["sg-efs"])
    data = user_data(site, HostKey("private\n", "public"), 1450)
    request = instances_request(site, 4, FOUND.image, "subnet-a", "sg-1", data, {"fortyfold-run": "run-1"})
    assert json.dumps(request, indent=2) + "\n" == (GOLDEN / "aws_instances.json").read_text()


def test_a_host_key_for_cloud_init() -> None:
    yaml = pytest.importorskip("yaml")
    key = make_host_key()
    config = yaml.safe_load(user_data(make_site(), key, 722))
    assert config["ssh_keys"] == {"ed25519_private": key.private, "ed25519_public": key.public}
    assert key.private.startswith("-----BEGIN OPENSSH PRIVATE KEY-----\n") and key.private not in repr(key)
    assert ["shutdown", "-h", "+722"] in config["runcmd"]


def test_an_instance_without_a_connection_ends(tmp_path: Path) -> None:
    """Five minutes without; those before the last connection do not count."""
    script = json.loads(user_data(make_site(idle_minutes=5), HostKey("", ""), 1).partition("\n")[2])["runcmd"][1][-1]
    log = tmp_path / "log"
    tools = {
        "sleep": f"echo minute >> {log}",
        "shutdown": f'echo "end $*" >> {log}',
        "ss": f"if [ $(wc -l < {log}) = 3 ]; then echo connected; fi",
    }
    for name, body in tools.items():
        tool = tmp_path / name
        tool.write_text(f"#!/bin/bash\n{body}\n")
        tool.chmod(0o755)
    subprocess.run(["/bin/sh", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True, timeout=20)
    assert log.read_text().splitlines() == ["minute"] * 8 + ["end -h now"]


def test_ssh_reads_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "ssh.conf"
    text = render_ssh_config(
        tmp_path / "100% known", make_site(user="ec2-user", identity="/keys/my key"), ["a.b", "c.d"]
    )
    config.write_text(text)
    read = subprocess.run(["ssh", "-G", "-F", str(config), "node1"], capture_output=True, text=True, check=True)
    lines = read.stdout.splitlines()
    for line in ("hostname c.d", "user ec2-user", "hostkeyalias fortyfold-instance", "identityfile /keys/my key"):
        assert line in lines
    assert any(line.startswith("userknownhostsfile") and "100% known" in line.replace("%%", "%") for line in lines)


TOOLS = {
    "sudo": 'shift; exec "$@"',
    "lsblk": 'case "$1" in -dnpro) echo "/dev/nvme0n1 vol9"; echo "/dev/nvme1n1 vol0123" ;; esac',
    "blkid": "exit {blkid}",
    "mkfs.ext4": ":",
    "mount": ":",
    "umount": ":",
    "sync": ":",
    "aws": 'echo image > "$7/image.jpg"',
}


def run_mount(folder: Path, site: AwsSite, blkid: int) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    return run_script(folder, mount_script(site, Volume("vol-0123", "it's_0", "us-east-1a", "available", 10)), blkid)


def run_script(folder: Path, script: str, blkid: int = 0) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The script, with tools that only note how they were called."""
    tools, log = folder / "tools", folder / "log"
    tools.mkdir(exist_ok=True)
    log.write_text("")
    for name, body in TOOLS.items():
        tool = tools / name
        note = "" if name == "sudo" else f'echo "{name} $*" >> {log}\n'
        tool.write_text(f"#!/bin/bash\n{note}{body.replace('{blkid}', str(blkid))}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    environment = {"PATH": f"{tools}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-s"], input=script, capture_output=True, text=True, env=environment)
    calls = [line for line in log.read_text().splitlines() if not line.startswith(("lsblk", "blkid"))]
    return done, calls


def test_an_empty_volume_is_filled_once(tmp_path: Path) -> None:
    target = tmp_path / "da ta"
    site = make_site(volume="it", mount=str(target), fill="s3://bucket/imagenet", instance_profile="reads")
    done, calls = run_mount(tmp_path, site, blkid=2)
    assert done.returncode == 0, done.stderr
    assert calls == [
        "mkfs.ext4 -q -m 0 /dev/nvme1n1",
        f"mount -o ro /dev/nvme1n1 {target}",
        f"mount -o remount,rw {target}",
        f"aws s3 sync --only-show-errors --region us-east-1 s3://bucket/imagenet {target}",
        "sync ",
        f"mount -o remount,ro {target}",
    ]
    assert sorted(path.name for path in target.iterdir()) == [".fortyfold-filled", "image.jpg"]
    done, calls = run_mount(tmp_path, site, blkid=0)
    assert done.returncode == 0 and calls == [f"mount -o ro /dev/nvme1n1 {target}"]
    (target / ".fortyfold-filling").touch()  # as a fill that was cut short leaves it
    assert any(call.startswith("aws s3 sync") for call in run_mount(tmp_path, site, blkid=0)[1])


@pytest.mark.parametrize(("blkid", "complaint"), [(2, "is empty, and the site does not say"), (8, "cannot tell what")])
def test_nothing_is_formatted_in_doubt(tmp_path: Path, blkid: int, complaint: str) -> None:
    done, calls = run_mount(tmp_path, make_site(volume="it", mount=str(tmp_path / "data")), blkid)
    assert done.returncode == 1 and complaint in done.stderr and "it's_0" in done.stderr
    assert calls == []


def test_the_disk_that_runs_are_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "runs"
    monkeypatch.setattr(volumes, "RUNS_MOUNT", str(target))
    done, calls = run_script(tmp_path, runs_script(make_site(run_root="fs-0a1b:/my.runs"), "fs-0a1b:/my.runs"))
    assert done.returncode == 0 and target.is_dir(), done.stderr
    (call,) = calls
    assert call.startswith("mount -t nfs4 -o nfsvers=4.1,") and call.endswith(f"amazonaws.com:/my.runs {target}")


def test_efs_is_copied(tmp_path: Path) -> None:
    script = mount_script(make_site(volume="x", fill="fs-0a1b:/imagenet"), Volume("vol-1", "x_0", "z", "available", 1))
    assert "fs-0a1b.efs.us-east-1.amazonaws.com:/imagenet" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"fill": "http://x"}, "neither s3"),
        ({"volume_offset": 2}, "volume_offset is for a volume"),
        ({"run_root": "s3://Bucket!"}, "'s3://Bucket!' is neither s3://bucket/folder nor a folder of EFS"),
        ({"run_root": "s3:/bucket/runs"}, "'s3:/bucket/runs' is neither s3://bucket/folder"),
        ({"volume": "x", "fill": "s3://bucket/x"}, "fill from S3 needs instance_profile"),
        ({"container": "x.sif"}, 'write bootstrap = "there"'),
        ({"run_root": "s3://bucket/runs"}, "run_root on S3 needs instance_profile"),
        ({"run_root": "fs-0a1b:/runs", "shared": True}, "shared needs run_root to be a folder"),
        ({"shared": True}, "shared needs run_root to be a folder"),
        ({"ssh_from": "0.0.0.0/0"}, "not one IPv4 address"),
        ({"groups": [{"nodes": 2}], "nodes": None}, "are alike"),
        ({"time_limit": "02:00"}, "leaves nothing of time_limit"),
        ({"private": True, "ssh_from": None}, "private needs ssh_from"),
        ({"variables": {"AWS_SECRET_ACCESS_KEY": "x"}}, "looks like a secret"),
    ],
)
def test_sites_that_cannot_be(keys: dict[str, Any], complaint: str) -> None:
    raw = {key: value for key, value in (SITE | keys).items() if value is not None}
    with pytest.raises(UserError, match=complaint):
        parse_site(raw, source="test")


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    monkeypatch.setattr(spot, "POLL_SECONDS", 0.02)
    with metadata() as server:
        monkeypatch.setenv(spot.ENDPOINT_VARIABLE, server.url)
        yield server


def test_whose_address_is_not_known(notices: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "WHO_AM_I", notices.url)
    site = make_site()
    assert group.find_own_address(site) == "203.0.113.7"
    with pytest.raises(UserError, match=r"cannot learn this machine's address from .*; name it: ssh_from"):
        group.find_own_address(site.model_copy(update={"ssh_from": None}))


def await_asked(server: Metadata, number: int) -> None:
    deadline = time.monotonic() + 10
    while len(server.asked) < number:
        assert time.monotonic() < deadline, "nobody asks"
        time.sleep(0.01)


def test_a_notice_is_a_stop_with_its_reason(notices: Metadata) -> None:
    stop = StopFlag()
    spot.watch_for_notice(stop)
    await_asked(notices, 4)
    assert not stop.requested
    notices.tokens = ["second"]  # the first is good no more
    notices.notice.set()
    deadline = time.monotonic() + 10
    while not stop.requested:
        assert time.monotonic() < deadline, "the notice is not heard"
        time.sleep(0.01)
    assert stop.signal is not None and (stop.signal.name, stop.reason) == ("SIGUSR1", "spot notice")
    assert [verb for verb, _ in notices.asked].count("PUT") == 2
