"""A site of kind aws: instances that are made for a run, and ended after it."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from fortyfold.spec.nodes import parse_seconds
from fortyfold.spec.section import Count, Positive
from fortyfold.spec.site import NOT_A_FOLDER, RemoteSite
from fortyfold.spec.site_words import Duration, Text, Word

RUNS_MOUNT = "/mnt/fortyfold-runs"  # where an instance has the folder of EFS that runs are in
_SOURCE = re.compile(r"s3://[a-z0-9.-]+(/[\w./=+@-]*)?|fs-[0-9a-f]+:/[\w./=+@-]*", re.ASCII)
_ADDRESS = re.compile(r"\d{1,3}(\.\d{1,3}){3}", re.ASCII)


def _check_source(text: str) -> str:
    if not _SOURCE.fullmatch(text) or text.endswith((".tar", ".tgz", ".tar.gz")):
        raise ValueError(f"{text!r} is neither s3://bucket/folder nor a folder of EFS such as fs-0123abcd:/imagenet")
    return text


def _check_address(text: str) -> str:
    if not _ADDRESS.fullmatch(text) or any(int(part) > 255 for part in text.split(".")):
        raise ValueError(f"{text!r} is not one IPv4 address, such as 203.0.113.7")
    return text


def _check_absolute(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError(f"{text!r} is no absolute path")
    return text


class AwsSite(RemoteSite):
    kind: Literal["aws"]
    region: Word
    """Such as us-east-1."""
    instance_type: Word
    """Such as p4d.24xlarge."""
    ami: Text
    """The image that instances begin with: its id, or its name, where * stands for anything and the newest is taken."""
    ami_owners: tuple[Word, ...] = ("self", "amazon")
    """Whose images a name may mean: anybody may publish one under any name."""
    key: Text
    """The key pair, as EC2 calls it, whose owner may log in."""
    identity: Text | None = None
    """The file with its private half; default: what ssh finds by itself, or its agent."""
    user: Word = "ubuntu"
    """Who to log in as; may use sudo without a password."""
    profile: Text | None = None
    """The profile of ~/.aws whose credentials to use; default: as AWS's own tools find them."""
    instance_profile: Word | None = None
    """The name of an instance profile: what the instances themselves may do, such as read from S3."""
    subnets: tuple[Word, ...] = ()
    """Where instances may be: all go to the first subnet's zone that has room; default: the default network's."""
    security_groups: tuple[Word, ...] = ()
    """Groups to be in besides the run's own, by id; EFS may ask for one."""
    private: bool = False
    """Whether this machine reaches the instances at their private addresses. They then have no public ones."""
    ssh_from: Annotated[str, AfterValidator(_check_address)] | None = None
    """The one address that ssh is let in from; default: this machine's, as AWS sees it."""
    spot: bool = False
    """Cheaper, and may be taken away: the run is saved, and goes on with new instances."""
    wait_minutes: Annotated[int, Field(ge=0)] = 30
    """So long a run that lost its instances waits for room for new ones."""
    hourly_price: Positive | None = None
    """What an instance costs an hour, for the question before anything is made."""
    disk_gib: Count | None = None
    """The size of each instance's own disk; default: the image's."""
    volume: Word | None = None
    """Node k gets the volume of the name VOLUME_k, which stays when the instance goes."""
    volume_offset: Annotated[int, Field(ge=0)] = 0
    """Node k gets VOLUME_(k + volume_offset) instead."""
    mount: Annotated[Text, AfterValidator(_check_absolute)] = "/data"
    """Where the volume is seen, read-only."""
    fill: Annotated[str, AfterValidator(_check_source)] | None = None
    """Where an empty volume is filled from, once: s3://bucket/folder, or EFS: fs-0123abcd:/folder."""
    time_limit: Duration = "1-00:00:00"
    """So long the instances live at most, even if this machine is gone: "1:00:00" is an hour, "2-00:00:00" two days."""
    warn_seconds: Annotated[int, Field(ge=10)] = 180
    """So long before the time limit the run is saved."""
    idle_minutes: Annotated[int, Field(ge=5)] = 20
    """After so long without a connection by ssh an instance ends by itself."""
    run_root: Text | None = None
    """Where runs live: S3 (s3://bucket/folder), or EFS (fs-0123abcd:/folder), where they outlive the instances; or a
    folder of the instances', by default ~/runs, from which every checkpoint is fetched."""
    shared: bool = False
    """Whether run_root is a folder that all instances and this machine see under the same path."""
    bootstrap: Literal["there", "wheel"] = "wheel"
    """How the instances get fortyfold: a wheel is sent, or the image has it already."""

    @model_validator(mode="after")
    def _is_possible_there(self) -> Self:
        self.refuse_idle(self.volume is not None, "a volume", "volume_offset", "mount", "fill")
        if self.warn_seconds >= parse_seconds(self.time_limit):
            raise ValueError('warn_seconds leaves nothing of time_limit; two hours are "2:00:00"')
        if self.groups:
            raise ValueError("the instances of a run are alike; leave groups out")
        if self.private and self.ssh_from is None:
            raise ValueError("private needs ssh_from: this machine's address in the instances' network")
        return self

    def check_run_root(self) -> None:
        if self.shared and (not self.run_root or self.keeps_runs):
            raise ValueError("shared needs run_root to be a folder that all instances and this machine see")
        if self.keeps_runs:
            _check_source(str(self.run_root))
        if self.run_store and not self.instance_profile:
            raise ValueError("run_root on S3 needs instance_profile: instances have to be allowed to write there")
        if (self.fill or "").startswith("s3://") and not self.instance_profile:
            raise ValueError("fill from S3 needs instance_profile: instances have to be allowed to read there")

    @property
    def keeps_runs(self) -> bool:
        return bool(NOT_A_FOLDER.match(self.run_root or ""))

    @property
    def run_store(self) -> str | None:
        """Where on S3 runs are kept, if they are."""
        return self.run_root.rstrip("/") if self.run_root and self.run_root.startswith("s3://") else None

    @property
    def run_disk(self) -> str | None:
        """The folder of EFS that runs are in, if they are."""
        return self.run_root if self.keeps_runs and not self.run_store else None

    @property
    def run_folder(self) -> str | None:
        return RUNS_MOUNT if self.run_disk else None if self.run_store else self.run_root
