"""All ranks read as one: whatever was written when, a step comes out once, whole, and in its place."""

import itertools
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_run import MadeRun

from fortyfold.spec import ranks
from fortyfold.spec.ranks import MergedEventReader, MergedStepReader, last_num_ranks, merge, read_merged_steps
from fortyfold.spec.records import STEP_DTYPE, Records, StepReader
from fortyfold.spec.run_dir import write_json

Shares = list[tuple[int, int, float, float]]


def steps_of(records: Records) -> list[tuple[int, int]]:
    return list(zip(records["attempt"].tolist(), records["step"].tolist(), strict=True))


def following(attempt: int, first: int, end: int) -> list[tuple[int, int]]:
    return [(attempt, step) for step in range(first, end)]


def made(folder: Path, *attempts: tuple[int, int, int]) -> MadeRun:
    """A run of attempts, each of so many ranks from one step to another."""
    run = MadeRun(folder)
    for number, (num_ranks, first, end) in enumerate(attempts, start=1):
        run.start(number, num_ranks, first)
        run.ranks_steps(first, end, number, num_ranks)
    return run


def test_one_rank_passes_unchanged(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    reader, alone = MergedStepReader(run.run_dir), StepReader(run.run_dir.steps())
    for first, end, attempt in ((0, 5, 1), (3, 9, 2), (9, 9, 2), (9, 20, 2)):  # as older runs: no start tells of ranks
        run.steps(first, end, attempt)
        assert reader.poll().tobytes() == alone.poll().tobytes()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_ranks_make_the_run_of_one(num_ranks: int, tmp_path: Path) -> None:
    alone = made(tmp_path / "alone", (1, 0, 20))
    together = made(tmp_path / "together", (num_ranks, 0, 20))
    assert read_merged_steps(together.run_dir).tobytes() == read_merged_steps(alone.run_dir).tobytes()


SHARE = st.tuples(
    st.just(0) | st.integers(0, 2**20),
    st.integers(0, 2**32 - 1),
    st.floats(-1e6, 1e6, width=32),
    st.floats(0, 1e6, width=32),
)


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(SHARE, min_size=n, max_size=n), min_size=1, max_size=6)))
def test_a_merged_step_is_what_a_plain_loop_adds_up(steps: list[Shares]) -> None:
    """A list of shares a step."""
    shares = [np.zeros(len(steps), STEP_DTYPE) for _ in steps[0]]
    for number, step in enumerate(steps):
        for rank, (images, digest, loss, seconds) in enumerate(step):
            for name, value in (("images", images), ("samples_digest", digest), ("loss", loss), ("end_time", seconds)):
                shares[rank][name][number] = value
            for name in (name for name in STEP_DTYPE.names or () if name.endswith("_seconds")):
                shares[rank][name][number] = seconds
            shares[rank][number]["lr"], shares[rank][number]["step"] = rank, number
    for number, (record, step) in enumerate(zip(merge(shares), steps, strict=True)):
        images = sum(share[0] for share in step)
        weights = [share[0] if images else 1 for share in step]
        loss = sum(weight * share[2] for weight, share in zip(weights, step, strict=True)) / sum(weights)
        assert (record["images"], record["step"], record["lr"]) == (images, number, 0)
        assert record["samples_digest"] == sum(share[1] for share in step) % 2**32
        assert record["loss"] == pytest.approx(loss, rel=1e-6, abs=1e-6)
        assert record["end_time"] == max(share[3] for share in step)
        for name in (name for name in STEP_DTYPE.names or () if name.endswith("_seconds")):
            assert record[name] == pytest.approx(np.mean([share[3] for share in step]), rel=1e-6)


def test_a_rank_without_images_says_nothing_of_the_loss() -> None:
    some, none = np.zeros(1, STEP_DTYPE), np.zeros(1, STEP_DTYPE)
    some["images"], some["loss"] = 4, 2.5
    for loss in (np.nan, np.inf, 0):
        none["loss"] = loss
        assert merge([some, none])["loss"] == 2.5
    some["images"], none["loss"] = 0, 1.5
    assert merge([some, none])["loss"] == 2.0  # nobody has images: the plain mean


def test_a_step_waits_for_the_rank_that_lags(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    reader = MergedStepReader(run.run_dir)
    run.start(1, ranks=3)
    run.steps(0, 6, 1, rank=0, ranks=3)
    run.steps(0, 4, 1, rank=1, ranks=3)
    assert len(reader.poll()) == 0
    run.steps(0, 9, 1, rank=2, ranks=3)
    assert steps_of(reader.poll()) == following(1, 0, 4)
    run.steps(4, 9, 1, rank=1, ranks=3)
    assert steps_of(reader.poll()) == following(1, 4, 6)
    assert len(reader.poll()) == 0
    run.steps(6, 8, 1, rank=0, ranks=3)
    assert steps_of(reader.poll()) == following(1, 6, 8)


def test_a_torn_tail_waits_for_its_rest(tmp_path: Path) -> None:
    run = made(tmp_path, (2, 0, 6))
    path = run.run_dir.steps(1)
    content = path.read_bytes()
    reader = MergedStepReader(run.run_dir)
    path.write_bytes(content[:7])  # not even the header
    assert len(reader.poll()) == 0
    path.write_bytes(content[:-100])
    assert steps_of(reader.poll()) == following(1, 0, 4)
    path.write_bytes(content)
    assert steps_of(reader.poll()) == following(1, 4, 6)


def test_what_a_killed_rank_never_wrote_is_left_out(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    reader = MergedStepReader(run.run_dir)
    run.start(1, ranks=2)
    run.steps(0, 10, 1, rank=0, ranks=2)
    run.steps(0, 7, 1, rank=1, ranks=2)
    assert steps_of(reader.poll()) == following(1, 0, 7)
    run.start(2, ranks=2, step=5)
    run.steps(5, 8, 2, rank=0, ranks=2)
    assert len(reader.poll()) == 0
    run.steps(5, 12, 2, rank=1, ranks=2)
    assert steps_of(reader.poll()) == following(2, 5, 8)
    run.steps(8, 12, 2, rank=0, ranks=2)
    assert steps_of(reader.poll()) == following(2, 8, 12)
    assert steps_of(read_merged_steps(run.run_dir)) == following(1, 0, 5) + following(2, 5, 12)


@pytest.mark.parametrize("sizes", [(3, 1, 3), (1, 3, 2), (2, 3, 1), (3, 2, 1)])
def test_a_run_goes_on_with_fewer_ranks_or_more(sizes: tuple[int, int, int], tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    live = MergedStepReader(run.run_dir)
    whole = []
    for attempt, (num_ranks, first, end) in enumerate(zip(sizes, (0, 4, 12), (8, 16, 20), strict=True), start=1):
        run.start(attempt, num_ranks, first)
        run.ranks_steps(first, end, attempt, num_ranks)
        whole += following(attempt, first, end)
        assert steps_of(live.poll()) == following(attempt, first, end)
    assert steps_of(MergedStepReader(run.run_dir).poll()) == whole
    merged = read_merged_steps(run.run_dir)
    assert merged["images"].tolist() == [8] * 16 + [16] * 4
    assert merged["loss"].tolist() == list(range(20, 0, -1))


ATTEMPTS = st.lists(
    st.tuples(st.integers(0, 12), st.lists(st.integers(0, 9), min_size=1, max_size=3)), min_size=1, max_size=5
)


@settings(max_examples=100)
@given(ATTEMPTS, st.randoms(use_true_random=False), st.integers(1, 7))
def test_whoever_follows_sees_what_a_later_reader_sees(
    attempts: list[tuple[int, list[int]]], random: Random, piece: int
) -> None:
    """Attempts from some step, in which each rank wrote so many, in turns that chance decides."""
    expected = []
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "PIECE", piece)
        run = MadeRun(Path(folder))
        live, seen = MergedStepReader(run.run_dir), []
        for attempt, (first, lengths) in enumerate(attempts, start=1):
            run.start(attempt, len(lengths), first)
            turns = list(itertools.chain(*([rank] * length for rank, length in enumerate(lengths))))
            random.shuffle(turns)
            written = [0] * len(lengths)
            for rank in turns:
                step = first + written[rank]
                run.steps(step, step + 1, attempt, rank, len(lengths))
                written[rank] += 1
                if random.random() < 0.3:
                    seen.append(live.poll())
            expected += following(attempt, first, first + min(lengths))
        seen.append(live.poll())
        later = MergedStepReader(run.run_dir).poll()
        assert steps_of(later) == expected
        assert np.concatenate(seen).tobytes() == later.tobytes()


def test_an_attempts_number_that_came_again_confuses_nobody(tmp_path: Path) -> None:
    """A power cut may take rank 0's last lines and leave another host's records."""
    run = made(tmp_path, (2, 0, 6))
    run.steps(4, 9, 2, rank=1, ranks=2)
    run.start(2, ranks=2, step=3)
    run.ranks_steps(3, 12, 2, ranks=2)
    assert steps_of(read_merged_steps(run.run_dir)) == following(1, 0, 3) + following(2, 3, 12)


def test_what_is_there_can_be_skipped(tmp_path: Path) -> None:
    run = made(tmp_path, (3, 0, 6), (2, 4, 8))
    with run.run_dir.steps(1).open("ab") as file:
        file.write(b"torn")
    reader = MergedStepReader(run.run_dir)
    reader.skip()
    assert len(reader.poll()) == 0
    with run.run_dir.steps(1).open("r+b") as file:
        file.truncate(run.run_dir.steps(0).stat().st_size)
    run.start(3, ranks=4, step=7)
    run.ranks_steps(7, 10, 3, ranks=4)
    assert steps_of(reader.poll()) == following(3, 7, 10)
    MergedStepReader(type(run.run_dir)(tmp_path / "nothing")).skip()


def test_each_ranks_quarantined_and_notes_are_told_once_an_attempt(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    reader = MergedEventReader(run.run_dir)
    run.event("started", 0, rank=1)
    run.event("quarantined", 0, rank=1, sample=3, path="a", reason="torn")
    assert reader.poll() == []  # how many ranks there are is not known yet
    run.start(1, ranks=3)
    run.event("quarantined", 1, sample=3, path="a", reason="torn")
    run.event("noted", 1, rank=2, message="slow disk")
    assert [event["kind"] for event in reader.poll()] == ["started", "quarantined", "noted"]
    run.event("noted", 2, rank=1, message="slow disk")
    run.event("quarantined", 2, rank=2, sample=4, path="b", reason="torn")
    run.event("failed", 2, rank=2, message="no memory")
    run.evaluation(2)
    run.evaluation(2)
    assert [event["kind"] for event in reader.poll()] == ["evaluated", "evaluated", "quarantined"]
    run.start(2, ranks=1)
    run.event("noted", 2, attempt=2, message="slow disk")
    assert [event["kind"] for event in reader.poll()] == ["started", "noted"]


def test_how_many_ranks_a_run_has(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    assert last_num_ranks(run.run_dir) == 1
    run.event("started", 0)  # as older runs
    assert last_num_ranks(run.run_dir) == 1
    run.start(2, ranks=4)
    run.start(3, ranks=3)
    assert last_num_ranks(run.run_dir) == 3
    write_json(run.run_dir.spec, {**run.run_dir.read_spec(), "ranks": 2})
    assert last_num_ranks(run.run_dir) == 2
