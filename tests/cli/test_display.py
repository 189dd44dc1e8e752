"""What the terminal shows of a run, from its files alone."""

from pathlib import Path

import pytest
from made_run import MadeRun

from fortyfold.cli.display import Display


def shown(run: MadeRun, capsys: pytest.CaptureFixture[str], num_ranks: int) -> list[str]:
    """The lines of an attempt of 10 steps after one that is not shown."""
    run.start(1, num_ranks)
    run.ranks_steps(0, 12, 1, num_ranks)
    with Display(run.run_dir, line_steps=5):
        run.start(2, num_ranks, step=10)
        run.event("quarantined", 10, rank=num_ranks - 1, attempt=2, sample=3, path="a.jpg", reason="torn")
        for rank in range(num_ranks):
            run.event("noted", 10, rank=rank, attempt=2, message="a slow disk")
        run.ranks_steps(10, 20, 2, num_ranks)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("num_ranks", "place"), [(1, "cpu, 1 threads"), (3, "3 ranks (cpu, 1 threads)")])
def test_figures_are_the_whole_runs_and_each_text_comes_once(
    num_ranks: int, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(MadeRun(tmp_path), capsys, num_ranks)
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1].partition("/")[0] for line in steps] == ["15", "20"]
    assert "  4 img/s  loss 8.000  lr 0.5  (means of 5 steps)" in steps[0]  # 8 images in 2 s
    told = [line for line in lines if line not in steps]
    assert told[0] == f"test_resnet on {place}: 64 images of 4 classes, 3 epochs, 20 steps; decoder: none"
    assert sorted(told[1:]) == ["left out the unreadable a.jpg: torn", "note: a slow disk"]
