"""EC2 for the tests of kind aws: one server for all, an empty region for each. (moto takes seconds to import.)"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from aws_stand_in import Cloud


@pytest.fixture(scope="session")
def served() -> Iterator["Cloud"]:
    from aws_stand_in import cloud

    with cloud() as made:
        yield made


@pytest.fixture
def ec2(served: "Cloud", monkeypatch: pytest.MonkeyPatch) -> "Cloud":
    """An empty region, its credentials, and no patience."""
    from fortyfold.launch import over_ssh
    from fortyfold.launch.aws import data_volumes, gang, instances, reaping, volumes

    served.reset()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    given = {"AWS_ENDPOINT_URL": served.url, "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "hush-hush"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for module in (instances, reaping, volumes, data_volumes):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(over_ssh, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(gang, "ROOM_SECONDS", 0.01)
    return served
