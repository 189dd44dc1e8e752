"""A run in one line: the figures of all its ranks."""

from pathlib import Path

import pytest
from made_run import MadeRun

from fortyfold.metrics.overview import overview


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_images_a_second_are_the_whole_runs(num_ranks: int, tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    run.start(1, num_ranks)
    run.ranks_steps(0, 12, 1, num_ranks)
    view = overview(run.run_dir)
    assert (view.images_per_second, view.epoch, view.num_epochs, view.state) == (8.0, 2, 3, "killed")


def test_a_rank_that_failed_is_not_a_kill(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.start(1, ranks=3)
    run.event("failed", 4, rank=2, message="no memory")
    assert overview(run.run_dir).state == "failed"
    run.start(2, ranks=3)
    assert overview(run.run_dir).state == "killed"
    run.event("finished", 20, attempt=2)
    assert overview(run.run_dir).state == "finished"
