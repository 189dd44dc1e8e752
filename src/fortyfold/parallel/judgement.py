"""Which rank is missing, judged from signs of life. Pure: signs and times go in, a failure or nothing comes out.

Three rules, in this order:

1. A rank whose signs have stopped coming for the deadline is lost: killed, stopped, or cut off. So are those that went
   silent soon after it: the other ranks of its host, say.
2. A rank that said that it failed has taken the others with it, if they have not noticed some seconds later.
3. Of the ranks that are furthest behind, one that has not moved for the deadline does not get on. Those further ahead
   only wait for it. One that is not armed (starting, saving…) is excused for EXCUSED times as long, and so are those
   that stand where it stands.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from fortyfold.spec.failure import Failure, name_ranks

EXCUSED = 12
NOTICE_SECONDS = 10.0


@dataclass(frozen=True)
class Sign:
    """What a rank says about itself."""

    count: int = 0
    """Grows with every sign."""
    step: int = 0
    point: int = 0
    """Counts within the step."""
    state: str = "starting"
    armed: bool = False
    done: bool = False
    """It needs the others no more, and ends."""
    failed: str = ""
    """Why it fails, and by its own fault."""

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.point

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: bytes) -> "Sign":
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Sighting:
    """The last sign of a rank, and when (by the watcher's clock) it came and the rank last got on."""

    sign: Sign | None = None
    heard_at: float = 0.0
    moved_at: float = 0.0

    def after(self, sign: Sign, now: float) -> "Sighting":
        """The sighting once `sign` was read at `now`."""
        before = self.sign
        heard = before is None or before.count != sign.count
        moved = before is None or before != replace(sign, count=before.count)
        return Sighting(sign, now if heard else self.heard_at, now if moved else self.moved_at)


Sightings = Mapping[int, Sighting]


def judge(own: int, sightings: Sightings, now: float, deadline_seconds: float) -> Failure | None:
    """What rank `own` has to say about the others, and about itself, at `now`."""
    return (
        _silent(own, sightings, now, deadline_seconds)
        or _failed(own, sightings, now)
        or _stuck(own, sightings, now, deadline_seconds)
    )


def silent_ranks(own: int, sightings: Sightings, now: float, seconds: float, unseen_seconds: float) -> list[int]:
    """The other ranks not heard for `seconds` (never heard at all: `unseen_seconds`), but for those that took leave."""
    return [
        rank
        for rank, sighting in sorted(sightings.items())
        if rank != own
        and now - sighting.heard_at > (seconds if sighting.sign else unseen_seconds)
        and not (sighting.sign and (sighting.sign.done or sighting.sign.failed))
    ]


def failed_ranks(own: int, sightings: Sightings) -> dict[int, str]:
    """The other ranks that said why they fail."""
    return {
        rank: sighting.sign.failed
        for rank, sighting in sorted(sightings.items())
        if rank != own and sighting.sign and sighting.sign.failed
    }


def _silent(own: int, sightings: Sightings, now: float, deadline: float) -> Failure | None:
    if not silent_ranks(own, sightings, now, deadline, EXCUSED * deadline):
        return None
    lost = silent_ranks(own, sightings, now, deadline / 2, EXCUSED * deadline)  # those that were lost with it, too
    sign = sightings[lost[0]].sign
    why = f"no sign of life for {deadline:g} s{_where(sign)}" if sign else f"not seen in {EXCUSED * deadline:g} s"
    return Failure(own, "lost", f"{name_ranks(lost)} {_were(lost)} lost: {why}", tuple(lost))


def _failed(own: int, sightings: Sightings, now: float) -> Failure | None:
    for rank, message in failed_ranks(own, sightings).items():
        if now - sightings[rank].moved_at > NOTICE_SECONDS:
            return Failure(own, "consequence", f"rank {rank} has failed: {message}", (rank,))
    return None


def _stuck(own: int, sightings: Sightings, now: float, deadline: float) -> Failure | None:
    present = {rank: seen for rank, seen in sightings.items() if seen.sign and not (seen.sign.done or seen.sign.failed)}
    hindmost = min((seen.sign.place for seen in present.values() if seen.sign), default=None)
    behind = {rank: seen for rank, seen in present.items() if seen.sign and seen.sign.place == hindmost}
    armed = all(seen.sign.armed for seen in behind.values() if seen.sign)
    patience = deadline if armed else EXCUSED * deadline
    stuck = sorted(rank for rank, seen in behind.items() if now - seen.moved_at > patience)
    if not stuck:
        return None
    do = "does" if len(stuck) == 1 else "do"
    message = f"{name_ranks(stuck)} {do} not get on for {patience:g} s{_where(sightings[stuck[0]].sign)}"
    return Failure(own, "lost", message, tuple(stuck))


def _were(ranks: list[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def _where(sign: Sign | None) -> str:
    return f" ({sign.state}, step {sign.step})" if sign else ""
