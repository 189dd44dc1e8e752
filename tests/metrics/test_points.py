"""Points: means over steps, evaluations between them, and nothing twice after a restart."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_run import NUM_IMAGES, MadeRun

from fortyfold.metrics.points import Point, PointReader, Replayed
from fortyfold.spec.recipe_file import load_recipe
from fortyfold.spec.records import DTYPES, HEADER, MAGIC, read_steps


def reader_of(run: MadeRun) -> PointReader:
    return PointReader(run.run_dir, run.recipe, NUM_IMAGES)


def all_points(run: MadeRun) -> list[Point]:
    return reader_of(run).poll(to_the_end=True)


def test_means_sizes_and_evaluations_in_the_order_of_examples_seen(tmp_path: Path) -> None:
    points = all_points(MadeRun(tmp_path).finish())
    assert [(point.kind, point.step, point.examples_seen) for point in points] == [
        ("steps", 5, 40), ("evaluation", 8, 64), ("steps", 10, 80), ("steps", 15, 120),
        ("steps", 20, 8 * 16 + 16 * 4), ("evaluation", 20, 192),
    ]  # fmt: skip
    assert points[0].values == {
        "losses/train": 18.0, "lr": 0.5, "speed/images_per_second": 8.0, "times/step_seconds": 1.0,
        "times/data_wait_seconds": 0.25, "times/read_seconds": 0, "times/decode_seconds": 0, "times/resize_seconds": 0,
        "sizes/px": 32, "sizes/global_batch": 8, "sizes/epoch": 0, "sizes/phase": 0,
    }  # fmt: skip
    last = points[-2].values  # one step of the first phase, four of the second
    assert (last["sizes/px"], last["sizes/global_batch"], last["sizes/phase"]) == (48, 16, 1)
    assert last["speed/images_per_second"] == (8 + 4 * 16) / 5
    assert points[1].values == {
        "losses/val": 2.0, "scores/top1": 58.0, "scores/top5": 90.0, "times/evaluate_seconds": 0.125,
    }  # fmt: skip
    assert points[-1].values["scores/ema_top1"] == 71.0
    assert [point.time for point in points[:2]] == [1004.0, 1008.5]


def test_a_window_is_given_out_when_it_is_whole_or_at_the_end(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    reader = reader_of(run)
    assert reader.poll() == []
    run.steps(0, 4)
    assert reader.poll() == []
    run.steps(4, 7)
    assert [point.step for point in reader.poll()] == [5]
    (rest,) = reader.poll(to_the_end=True)
    assert (rest.step, rest.examples_seen, rest.values["losses/train"]) == (7, 56, 14.5)


def test_an_evaluation_waits_for_the_steps_before_it(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    reader = reader_of(run)
    run.steps(0, 6)
    run.evaluation(8)
    assert [point.step for point in reader.poll()] == [5]
    run.steps(6, 8)
    assert [(point.step, point.examples_seen) for point in reader.poll()] == [(8, 64)]


def test_a_restart_is_told_and_a_new_reader_sees_the_last_attempt(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.steps(0, 12)
    reader = reader_of(run)
    assert len(reader.poll()) == 2
    run.steps(11, 13, attempt=2)  # nothing of it was given out
    assert reader.poll() == []
    run.steps(6, 20, attempt=3)
    with pytest.raises(Replayed):
        reader.poll()
    assert [point.values["times/step_seconds"] for point in all_points(run)] == [1.0, 2.6, 3.0, 3.0]
    assert [point.examples_seen for point in all_points(run)] == [40, 80, 120, 192]


def test_an_evaluation_done_again_is_told(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.steps(0, 8)
    run.evaluation(8)
    reader = reader_of(run)
    assert [point.step for point in reader.poll()] == [5, 8]
    run.evaluation(8, top1=99.0)
    with pytest.raises(Replayed):
        reader.poll()
    assert all_points(run)[-1].values["scores/top1"] == 99.0


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 20), st.booleans()), max_size=8), st.integers(1, 9))
def test_whoever_follows_ends_with_what_a_later_reader_sees(
    attempts: list[tuple[int, int, bool]], every_steps: int
) -> None:
    """Attempts of so many steps, each from some step that was reached; evaluations after 8 and 16 steps."""
    with TemporaryDirectory() as folder:
        run = MadeRun(Path(folder), every_steps=every_steps)
        reader, points, reached = reader_of(run), list[Point](), 0
        for number, (num_steps, start, look) in enumerate([*attempts, (20, 20, True)], start=1):
            first = min(start, reached)
            for step in range(first, reached := min(first + num_steps, 20)):
                run.steps(step, step + 1, number)
                if (step + 1) % 8 == 0:
                    run.evaluation(step + 1, top1=number)
                if look:
                    try:
                        points += reader.poll()
                    except Replayed:
                        reader, points = reader_of(run), []
        try:
            points += reader.poll(to_the_end=True)
        except Replayed:
            points = all_points(run)
        assert points == all_points(run)
        assert points[-1].examples_seen == read_steps(run.run_dir.steps())["images"].sum() == 192
        ends = [point.step for point in points if point.kind == "steps"]
        assert ends == [*range(every_steps, 20, every_steps), 20]
        assert [point.step for point in points if point.kind == "evaluation"] == [8, 16]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_points_of_several_ranks_are_those_of_one(num_ranks: int, tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "together")
    reader = reader_of(run)
    run.start(1, num_ranks)
    run.ranks_steps(0, 4, 1, num_ranks)
    run.steps(4, 8, 1, rank=0, ranks=num_ranks)
    run.evaluation(8)
    assert reader.poll() == []  # the other ranks' share is not there yet
    for rank in range(1, num_ranks):
        run.steps(4, 8, 1, rank, num_ranks)
    points = reader.poll()
    run.ranks_steps(8, 20, 1, num_ranks)
    run.evaluation(20, ema_top1=71.0)
    assert points + reader.poll(to_the_end=True) == all_points(MadeRun(tmp_path / "alone").finish())


def test_a_restart_with_fewer_ranks_is_told(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.start(1, ranks=3)
    run.ranks_steps(0, 12, 1, ranks=3)
    reader = reader_of(run)
    assert [point.examples_seen for point in reader.poll()] == [40, 80]
    run.start(2, ranks=2, step=6)
    run.steps(6, 12, 2, rank=0, ranks=2)
    assert reader.poll() == []
    run.steps(6, 12, 2, rank=1, ranks=2)
    with pytest.raises(Replayed):
        reader.poll()
    assert [point.examples_seen for point in all_points(run)] == [40, 80, 96]
    assert [point.values["times/step_seconds"] for point in all_points(run)] == [1.0, 1.8, 2.0]


def test_the_global_batch_of_a_rank_batch_counts_all_ranks(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    phases = [{"epochs": 3, "px": 32}]
    recipe = load_recipe("tiny", {"epochs": None, "phases": phases, "global_batch": None, "rank_batch": 4})
    run.start(1, ranks=2)
    run.ranks_steps(0, 10, 1, ranks=2)
    points = PointReader(run.run_dir, recipe, NUM_IMAGES).poll(to_the_end=True)
    assert {point.values["sizes/global_batch"] for point in points} == {8}


def test_records_of_version_1_give_points(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    old = np.zeros(5, DTYPES[1])
    old["step"], old["images"], old["step_seconds"] = range(5), 8, 1
    run.run_dir.steps().write_bytes(HEADER.pack(MAGIC, 1, DTYPES[1].itemsize) + old.tobytes())
    (point,) = all_points(run)
    assert point.examples_seen == 40 and "times/read_seconds" not in point.values
