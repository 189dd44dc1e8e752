"""Who is missing: the rules, without threads and clocks."""

from fortyfold.parallel.judgement import EXCUSED, NOTICE_SECONDS, Sighting, Sign, judge
from fortyfold.spec.failure import Failure

DEADLINE = 10.0
TRAINING = Sign(count=1, step=5, point=2, state="training", armed=True)


def seen(
    step: int = 5, *, heard_at: float = 100.0, moved_at: float = 100.0, point: int = 2, **fields: bool | str
) -> Sighting:
    sign = Sign(1, step, point, **{"state": "training", "armed": True} | fields)  # type: ignore[arg-type]
    return Sighting(sign, heard_at, moved_at)


def verdict(*sightings: Sighting, now: float = 100.0) -> Failure | None:
    """What rank 0 says."""
    return judge(0, dict(enumerate(sightings)), now, DEADLINE)


def message(*sightings: Sighting, now: float = 100.0) -> str:
    failure = verdict(*sightings, now=now)
    return failure.message if failure else ""


def test_all_is_well() -> None:
    assert verdict(seen(), seen(), Sighting(), now=100.0) is None


def test_a_silent_rank_is_lost_and_is_not_blamed_for_standing_still() -> None:
    failure = verdict(seen(6), seen(heard_at=89.9, moved_at=80), seen(6))
    assert failure == Failure(0, "lost", "rank 1 was lost: no sign of life for 10 s (training, step 5)", (1,))
    assert verdict(seen(), seen(heard_at=90.1)) is None
    assert message(seen(), seen(heard_at=0), seen(heard_at=0)).startswith("ranks 1 and 2 were lost")


def test_ranks_that_are_lost_together_are_named_together() -> None:
    """The deadline of one passes a moment before that of the other."""
    failure = verdict(seen(), seen(heard_at=91), seen(heard_at=89), seen(heard_at=99))
    assert failure is not None and failure.ranks == (1, 2)


def test_one_that_never_came() -> None:
    late = EXCUSED * DEADLINE + 1
    fresh = seen(heard_at=late, moved_at=late)
    assert message(fresh, Sighting(), now=late) == "rank 1 was lost: not seen in 120 s"
    assert not message(seen(), Sighting(), now=late - 2 - DEADLINE)


def test_the_one_furthest_behind_does_not_get_on() -> None:
    """The others stand still as long: they wait for it."""
    waiting = seen(6, moved_at=80)
    failure = verdict(waiting, seen(5, moved_at=80), waiting)
    assert failure == Failure(0, "lost", "rank 1 does not get on for 10 s (training, step 5)", (1,))
    assert message(seen(5, point=1, moved_at=80), seen(5, point=2, moved_at=80)).startswith("rank 0 does not")
    assert message(*[seen(moved_at=80)] * 3).startswith("ranks 0, 1 and 2 do not get on")


def test_an_excused_one_and_those_that_wait_for_it() -> None:
    saving = seen(5, moved_at=80, armed=False, state="saving")
    assert not message(saving, seen(6, moved_at=80))
    assert not message(saving, seen(5, moved_at=80))
    late = 80 + EXCUSED * DEADLINE + 1
    saving, waiting = seen(5, heard_at=late, moved_at=80, armed=False, state="saving"), seen(6, heard_at=late)
    assert message(saving, waiting, now=late) == "rank 0 does not get on for 120 s (saving, step 5)"


def test_leave_takers_are_neither_lost_nor_behind() -> None:
    assert not message(seen(6), seen(5, heard_at=0, moved_at=0, done=True))


def test_a_failure_that_was_told_ends_the_others() -> None:
    told = seen(5, heard_at=0, moved_at=100 - NOTICE_SECONDS - 1, failed="ValueError: no luck")
    failure = verdict(seen(6), told)
    assert failure == Failure(0, "consequence", "rank 1 has failed: ValueError: no luck", (1,))
    assert not message(seen(6), seen(5, failed="ValueError: no luck"))


def test_a_sighting_notes_life_and_progress_apart() -> None:
    first = Sighting().after(TRAINING, 3.0)
    assert (first.heard_at, first.moved_at) == (3.0, 3.0)
    assert first.after(TRAINING, 4.0) == first
    again = first.after(Sign(2, 5, 2, "training", True), 4.0)
    assert (again.heard_at, again.moved_at) == (4.0, 3.0)
    assert again.after(Sign(3, 5, 3, "training", True), 5.0).moved_at == 5.0
    assert again.after(Sign(3, 5, 2, "training", False), 5.0).moved_at == 5.0
    assert Sign.from_text(TRAINING.to_text().encode()) == TRAINING
