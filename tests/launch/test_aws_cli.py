"""`fortyfold aws`, and `train` on a site of kind aws, as somebody types them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from aws_hosts import TRAINED, Hosts, make_site, save
from aws_stand_in import ZONE, Cloud

from fortyfold.launch.aws.tags import DATA, RUN, own_name
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.toml_text import to_toml

Fortyfold = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sites.toml").write_text(f"[cloud]\n{to_toml(make_site(volume='imagenet'))}\n[desk]\nkind = 'local'\n")


def test_training_asks_first(ec2: Cloud, fortyfold: Fortyfold) -> None:
    ec2.make_volumes(*(f"imagenet_{node}" for node in range(4)))
    code, out, err = fortyfold("train", "tiny", "--on", "cloud")
    assert (code, err) == (2, "fortyfold: nobody is there to be asked; --yes goes on without\n")
    assert f"to be made in {ZONE}, with the tag {RUN}=tiny-" in out and "4 × p3.16xlarge, spot" in out
    assert ec2.instances() == [] and ec2.groups() == []


def test_training_goes_on_with_new_instances(ec2: Cloud, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch) -> None:
    ec2.make_volumes(*(f"imagenet_{node}" for node in range(4)))
    hosts = Hosts(ec2, RunDir(Path("runs/tiny").absolute()), save(3, "spot notice"), TRAINED)
    hosts.take_over(monkeypatch)
    code, out, _ = fortyfold("train", "tiny", "--on", "cloud", "--yes")
    assert code == 0 and len(hosts.gangs) == 2
    assert "note: spot notice; starting again from the last checkpoint" in out
    assert ec2.left() == [] and len(ec2.instances("terminated")) == 8


@pytest.mark.parametrize(
    ("state", "complaint"), [("missing", "there is no volume imagenet_0"), ("in-use", "is in-use, not available")]
)
def test_volumes_are_looked_at_first(ec2: Cloud, fortyfold: Fortyfold, state: str, complaint: str) -> None:
    if state == "in-use":
        ids = ec2.make_volumes(*(f"imagenet_{node}" for node in range(4)))
        (other,) = ec2.ec2.run_instances(ImageId=ec2.image, MinCount=1, MaxCount=1)["Instances"]
        ec2.ec2.attach_volume(VolumeId=ids[2], InstanceId=other["InstanceId"], Device="/dev/sdf")
    code, _, err = fortyfold("train", "tiny", "--on", "cloud", "--yes")
    assert code == 2 and err.count("\n") == 1 and complaint in err
    assert ec2.groups() == [] and len(ec2.instances()) == (1 if state == "in-use" else 0)


def test_no_credentials(ec2: Cloud, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name, value in (("AWS_EC2_METADATA_DISABLED", "true"), ("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")):
        monkeypatch.setenv(name, value)
    code, _, err = fortyfold("train", "tiny", "--on", "cloud", "--yes")
    assert code == 2 and err.startswith("fortyfold: AWS: there are no credentials;") and err.count("\n") == 1


def test_without_boto3(fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    code, _, err = fortyfold("aws", "reap", "cloud")
    assert (code, err) == (2, "fortyfold: a site of kind aws needs boto3; pip install 'fortyfold[aws]'\n")


def test_volumes_of_a_snapshot(ec2: Cloud, fortyfold: Fortyfold) -> None:
    ec2.make_volumes("original")
    code, out, err = fortyfold("aws", "snapshot", "cloud", "original", "--name", "imagenet-2012", "--yes")
    assert code == 0, err
    of_it = ("--snapshot", "imagenet-2012", "--zone", ZONE, "--size", 600, "--iops", 16000)
    code, out, err = fortyfold("aws", "volumes", "cloud", "imagenet", 3, *of_it, "--offset", 1, "--yes")
    assert code == 0, err
    assert "3 gp3 volumes, imagenet_1 to imagenet_3, in us-east-1b: 600 GiB and 16000 IOPS each" in out
    (snapshot,) = ec2.ec2.describe_snapshots(OwnerIds=["self"], Filters=[{"Name": "tag-key", "Values": [DATA]}])[
        "Snapshots"
    ]
    made = ec2.ec2.describe_volumes(Filters=[{"Name": "tag-key", "Values": [DATA]}])["Volumes"]
    assert {(each["VolumeType"], each["Size"], each["Iops"], each["SnapshotId"]) for each in made} == {
        ("gp3", 600, 16000, snapshot["SnapshotId"])
    }
    code, _, err = fortyfold("aws", "volumes", "cloud", "imagenet", 2, *of_it, "--yes")
    assert code == 2 and "there is a volume imagenet_1 already" in err
    assert len(ec2.volume_states()) == 4


def test_a_check_asks_ec2_and_makes_nothing(ec2: Cloud, fortyfold: Fortyfold) -> None:
    code, out, _ = fortyfold("sites", "check", "cloud")
    assert code == 2 and out.startswith("cloud: AWS: there is no volume imagenet_0; ")
    ec2.make_volumes(*(f"imagenet_{number}" for number in range(4)))
    code, out, _ = fortyfold("sites", "check", "cloud")
    assert code == 0, out
    assert "to be made in " in out and out.splitlines()[-1].startswith("cloud: ok (nothing was made")
    assert ec2.left() == [] and set(ec2.volume_states()) == {"available"}


def test_reaping_ends_runs_and_leaves_data(ec2: Cloud, fortyfold: Fortyfold) -> None:
    ec2.make_volumes("imagenet_0")
    mine = [{"Key": RUN, "Value": "tiny-1"}, {"Key": "fortyfold-owner", "Value": "somebody@else"}]
    ec2.ec2.create_security_group(
        GroupName="left", Description="left", TagSpecifications=[{"ResourceType": "security-group", "Tags": mine}]
    )
    tags = [{"ResourceType": "instance", "Tags": mine}]
    ec2.ec2.run_instances(ImageId=ec2.image, MinCount=2, MaxCount=2, TagSpecifications=tags)
    ec2.ec2.run_instances(ImageId=ec2.image, MinCount=1, MaxCount=1)  # not ours
    told = fortyfold("aws", "reap", "cloud", "--yes")[1]
    assert told == f"nothing is left of {own_name()}; of other runs and people 3, which --everybody ends\n"
    code, _, err = fortyfold("aws", "reap", "cloud", "--everybody")
    assert code == 2 and "nobody is there to be asked" in err and len(ec2.instances("running")) == 3
    code, out, _ = fortyfold("aws", "reap", "cloud", "--everybody", "--yes")
    assert code == 0 and out.count("ended instance i-") == 2 and out.count("ended security group sg-") == 1
    assert len(ec2.instances("running")) == 1 and ec2.groups() == [] and "available" in ec2.volume_states()


def test_only_sites_of_aws(fortyfold: Fortyfold) -> None:
    assert fortyfold("aws", "reap", "desk")[::2] == (2, "fortyfold: desk is a site of kind local, not aws\n")
