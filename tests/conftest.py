"""Fixtures that several tests share: small data sets made once, the command line, what the machine offers."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from rank_pool import RankPool

from fortyfold.cli.main import run
from fortyfold.cli.openmp import calm_openmp
from fortyfold.data.demo import DemoSpec, make_demo
from fortyfold.data.prepare.shard import Sharding, make_shards
from fortyfold.data.splits import find_splits, open_folder
from fortyfold.spec.stop import REASONS

calm_openmp()
settings.register_profile("steady", deadline=None, derandomize=True)  # this machine may be slow, never lucky
settings.load_profile("steady")

TINY = DemoSpec(classes=4, images=300, width=48, height=48, seed=0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drills are left out; where several processes share the tests file by file, the long files are begun first."""
    if "drills" not in _required():
        for item in items:
            if item.get_closest_marker("drill"):
                item.add_marker(pytest.mark.skip(reason="takes minutes; `make drills` runs it"))
    if hasattr(config, "workerinput"):
        long = ("tests/test_docs.py", "tests/runs/", "tests/cluster/")
        items.sort(key=lambda item: [not item.nodeid.startswith(name) for name in long])


def _required() -> list[str]:
    return os.environ.get("FORTYFOLD_REQUIRE", "").split(",")


def skip_or_fail(name: str, why: str) -> None:
    """Skip for want of `name`, unless FORTYFOLD_REQUIRE says that it must be there."""
    if name in _required():
        pytest.fail(f"FORTYFOLD_REQUIRE names {name}, but {why}")
    pytest.skip(why)


@pytest.fixture(scope="session")
def real_jpegs() -> Path:
    """200 real ImageNet JPEGs, named <class>_<name>.JPEG."""
    folder = Path(os.environ.get("FORTYFOLD_TEST_DATA", "")) / "imagenet-sample"
    if not os.environ.get("FORTYFOLD_TEST_DATA") or not folder.is_dir():
        skip_or_fail("test-data", "FORTYFOLD_TEST_DATA does not lead to imagenet-sample/")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["FORTYFOLD_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of the recipe `tiny`: 250 training images, 50 for validation, 4 classes."""
    root = tmp_path_factory.mktemp("data") / "tiny"
    make_demo(root, TINY)
    return root


@pytest.fixture(scope="session")
def tiny_shards(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in 24 and 6 shards."""
    root = tmp_path_factory.mktemp("sharded") / "tiny"
    for split, folder in find_splits(tiny_data).items():
        sharding = Sharding(open_folder(folder), {"train": 24, "val": 6}[split], "never")
        make_shards(sharding, root / split, (0, 1), 2, 0, lambda done, total: None)
    return root


@pytest.fixture(scope="session")
def few_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 training images, 4 for validation, 4 classes."""
    root = tmp_path_factory.mktemp("data") / "few"
    make_demo(root, DemoSpec(classes=4, images=28, width=48, height=48, seed=0))
    return root


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[RankPool]:
    pool = RankPool(3)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture
def fortyfold(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Runs a command line in this process; gives exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    before = {number: signal.getsignal(number) for number in REASONS}
    yield call
    for number, handler in before.items():
        signal.signal(number, handler)


def start(*arguments: object, **options: object) -> "subprocess.Popen[str]":
    """A command line in a process of its own."""
    command = [sys.executable, "-m", "fortyfold", *map(str, arguments)]
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
