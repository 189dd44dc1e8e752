"""A run's ranks read as one: a record a step of all that took part, and what any of them has to tell.

Each rank writes its own share of a step (spec/records.py). How many ranks an attempt had is in rank 0's `started`; a
run may go on with fewer or more, so files of ranks that exist no more stay behind, and are read for their attempts.

A step is given out when all ranks of its attempt have written it, in rank 0's order. One that a rank never wrote,
since it was killed, is left out. Whatever the moments of the polls, the same figures come out to the last bit: shares
are added in the order of ranks. Files are read piece by piece, so memory does not grow with the run.
"""

import json
from collections.abc import Iterable, Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from fortyfold.spec.events import Event, EventReader, read_events
from fortyfold.spec.records import STEP_DTYPE, Records, StepReader, last_attempts, standing
from fortyfold.spec.run_dir import RunDir

PIECE = 8192  # records of a rank at a time: forty ranks' are 20 MB
STEP_BITS = 40  # of a key; the attempt is above them
TOLD_BY_ALL = ("quarantined", "noted")  # events of which each rank has its own

Keys = NDArray[np.int64]


def num_ranks(events: Iterable[Event]) -> dict[int, int]:
    """How many ranks each attempt had, from rank 0's events. Runs from before there were several do not say: one."""
    return {event["attempt"]: event.get("ranks", 1) for event in events if event["kind"] == "started"}


def last_num_ranks(run_dir: RunDir) -> int:
    """Of a run's last attempt: as run.json says, which is there first, or else its start."""
    attempts = num_ranks(read_events(run_dir.events()))
    return int(run_dir.read_spec().get("ranks") or attempts.get(max(attempts, default=0), 1))


def read_merged_steps(run_dir: RunDir) -> Records:
    """All steps of a run in their order, each over all ranks; of a replayed step only the last attempt's."""
    return last_attempts(MergedStepReader(run_dir).poll())


def merge(shares: Sequence[Records]) -> Records:
    """One record a step from each rank's; all have the same steps, rank 0's come first.

    Images and digests are sums (those modulo 2**32), seconds are means over the ranks, the end is the latest. The loss
    is the mean weighted by images: that of the whole step. The rest is rank 0's.
    """
    if len(shares) == 1:
        return shares[0]
    merged = shares[0].copy()
    for name in ("images", "samples_digest"):
        merged[name] = reduce(np.add, (share[name] for share in shares))
    merged["end_time"] = reduce(np.maximum, (share["end_time"] for share in shares))
    for name in (name for name in merged.dtype.names or () if name.endswith("_seconds")):
        merged[name] = reduce(np.add, (share[name].astype("f8") for share in shares)) / len(shares)
    merged["loss"] = _mean_loss(shares, merged["images"])
    return merged


def _mean_loss(shares: Sequence[Records], images: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Weighted by images; of a step without any, the plain mean. A rank without images may have no finite loss."""
    total = np.zeros(len(images))
    for share in shares:
        weights = np.where(images > 0, share["images"], 1)
        total += np.multiply(weights, share["loss"], out=np.zeros(len(images)), where=weights > 0)
    return total / np.where(images > 0, images, len(shares))


class MergedStepReader:
    """Follows all ranks: each `poll` gives the steps that became whole since the last. One rank's pass unchanged."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._events = EventReader(run_dir.events())
        self._num_ranks: dict[int, int] = {}  # by attempt
        self._ranks = [_Rank(run_dir, 0)]

    def poll(self) -> Records:
        pieces, goes_on = [], True
        while goes_on:
            goes_on = self._ranks[0].read_piece()
            self._find_ranks()  # afterwards: an attempt's start is written before its steps
            pieces.append(self._merge_whole() if len(self._ranks) > 1 else self._ranks[0].take_all())
        return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]

    def skip(self) -> None:
        """Pass over what is there, without reading it."""
        self._find_ranks()
        for rank in self._ranks:
            rank.skip()

    def _find_ranks(self) -> None:
        self._num_ranks |= num_ranks(self._events.poll())
        most = max(self._num_ranks.values(), default=1)
        self._ranks += [_Rank(self._run_dir, rank) for rank in range(len(self._ranks), most)]

    def _merge_whole(self) -> Records:
        """The steps of rank 0's piece that all have. The others are read after it, and as far: what was over is there.

        So a step that is not whole, but before one that is, never will be: its rank, or its attempt, went on.
        """
        keys = self._ranks[0].keys
        if not len(keys):
            return np.empty(0, STEP_DTYPE)
        blocks, last = [], -1
        for attempt_keys in np.split(keys, np.flatnonzero(np.diff(keys >> STEP_BITS)) + 1):
            ranks = self._ranks[: self._num_ranks.get(int(attempt_keys[0]) >> STEP_BITS, 1)]
            for rank in ranks[1:]:
                rank.read_to(attempt_keys[-1])
            whole = reduce(_common, (rank.keys for rank in ranks[1:]), attempt_keys)
            blocks.append(merge([rank.records_of(whole) for rank in ranks]))
            last = int(whole[-1]) if len(whole) else last
        for rank in self._ranks:
            rank.drop_to(last)
        return np.concatenate(blocks)


class _Rank:
    """A rank's records that were read and not given out yet, with ascending keys: attempt, then step."""

    keys: Keys
    _records: Records

    def __init__(self, run_dir: RunDir, rank: int) -> None:
        self._reader = StepReader(run_dir.steps(rank))
        self.skip = self._reader.skip
        self._set(np.empty(0, STEP_DTYPE))

    def read_piece(self) -> bool:
        """Whether there may be more at once."""
        came = self._reader.poll(PIECE)
        if len(came):
            self._set(np.concatenate([self._records, came]) if len(self._records) else came)
        return len(came) == PIECE

    def read_to(self, key: int) -> None:
        """Read up to `key`, or as far as there is something."""
        while (not len(self.keys) or self.keys[-1] < key) and self.read_piece():
            pass

    def records_of(self, keys: Keys) -> Records:
        records: Records = self._records[np.searchsorted(self.keys, keys)]
        return records

    def take_all(self) -> Records:
        records = self._records
        self._set(records[:0])
        return records

    def drop_to(self, key: int) -> None:
        start = np.searchsorted(self.keys, key, side="right")
        self._records, self.keys = self._records[start:], self.keys[start:]

    def _set(self, records: Records) -> None:
        keys = (records["attempt"].astype("i8") << STEP_BITS) | records["step"]
        holds = standing(keys)  # all, unless a power cut made rank 0 forget an attempt, whose number came again
        self._records, self.keys = (records, keys) if holds.all() else (records[holds], keys[holds])


def _common(some: Keys, others: Keys) -> Keys:
    """Those of `some` that are among `others`; both ascend."""
    return some[np.searchsorted(others, some, "left") < np.searchsorted(others, some, "right")]


class MergedEventReader:
    """Follows rank 0's events and, of the other ranks, what they may tell alone; each text once an attempt."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._readers = [EventReader(run_dir.events())]
        self._told: set[str] = set()

    def poll(self) -> list[Event]:
        events = self._readers[0].poll()
        most = max(num_ranks(events).values(), default=1)
        self._readers += [EventReader(self._run_dir.events(rank)) for rank in range(len(self._readers), most)]
        for reader in self._readers[1:]:
            events += [event for event in reader.poll() if event["kind"] in TOLD_BY_ALL]
        return [event for event in events if self._is_new(event)]

    def _is_new(self, event: Event) -> bool:
        if event["kind"] not in TOLD_BY_ALL:
            return True
        text = json.dumps({key: value for key, value in event.items() if key not in ("time", "step")}, sort_keys=True)
        is_new = text not in self._told
        self._told.add(text)
        return is_new
