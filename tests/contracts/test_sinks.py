"""What every file in sinks/ must do: say the numbers of the run, each once, however often it is attached."""

from collections.abc import Callable
from pathlib import Path

import pytest
from made_run import NUM_IMAGES, MadeRun
from sink_readers import READERS, Rows

from fortyfold.metrics.points import PointReader
from fortyfold.sinks import write_run
from fortyfold.spec import plugin

NAMES = plugin.names("fortyfold.sinks")


def expected(run: MadeRun) -> Rows:
    points = PointReader(run.run_dir, run.recipe, NUM_IMAGES).poll(to_the_end=True)
    return [(point.examples_seen, pytest.approx(point.values, rel=1e-6)) for point in points]  # type: ignore[misc]


def test_there_is_a_reader_for_each() -> None:
    assert list(READERS) == NAMES == ["csv", "tensorboard", "wandb"]


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_the_run_says_and_nothing_twice(name: str, tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run", wandb_offline=True)
    run.steps(0, 8)
    run.evaluation(8)
    run.steps(8, 12)
    place = write_run(name, run.run_dir, {}, lambda: False)
    assert READERS[name](run.run_dir) == expected(run)
    run.steps(6, 20, attempt=2)
    run.evaluation(8)
    run.evaluation(20, ema_top1=71.0)
    for _ in range(2):
        place = write_run(name, run.run_dir, {}, lambda: False)
    rows = READERS[name](run.run_dir)
    assert rows == expected(run)
    assert [row[0] for row in rows] == [40, 64, 80, 120, 192, 192]
    assert str(tmp_path) in str(place)
    assert plugin.load("fortyfold.sinks", name).__doc__


@pytest.mark.parametrize("name", NAMES)
def test_it_follows_a_run_through_a_restart(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fortyfold.sinks.POLL_SECONDS", 0.0)
    run = MadeRun(tmp_path / "run", wandb_offline=True)
    rounds: list[Callable[[], None]] = [
        lambda: run.steps(0, 12),
        lambda: run.event("started", 6),
        lambda: run.steps(6, 9, attempt=2),
        lambda: run.steps(9, 20, attempt=2),
    ]

    def goes_on() -> bool:
        if rounds:
            rounds.pop(0)()
            return True
        return False

    write_run(name, run.run_dir, {}, goes_on)
    assert READERS[name](run.run_dir) == expected(run)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_without_a_step_is_no_error(name: str, tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run", wandb_offline=True)
    assert write_run(name, run.run_dir, {}, lambda: False)
    assert READERS[name](run.run_dir) == []
