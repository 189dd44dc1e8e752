"""A rank's pulse: it tells the others that it lives and gets on, notices who does not, and then ends this process.

Collectives wait forever, or for half an hour, for a rank that was killed on another host, stopped, or cut off. Two
daemon threads beside the training loop keep that to the deadline, whatever the loop is blocked in:

- one talks: once a round it sets its own key in torchrun's store on node 0, over a connection of its own, and reads
  everybody's. It may block for minutes when the network is cut.
- one watches and never touches the network. It judges (judgement.py) by a clock that stands still while this process
  does: whoever was stopped or suspended himself does not blame the others.

Cost: a round trip of less than a kilobyte a rank and second; for the loop an assignment a beat.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from fortyfold.parallel.failure import end_process
from fortyfold.parallel.judgement import Sighting, Sign, failed_ranks, judge, silent_ranks
from fortyfold.spec.failure import Failure, one_line
from fortyfold.spec.world import World

ROUND_SECONDS = 1.0
SILENT_ROUNDS = 3
LAST_WORD_SECONDS = 2.0


class Pulse:
    """One a rank, from `start` to `close`. The loop calls `beat`, `arm` and `excused`; the rest goes by itself.

    Ranks are compared by where they beat: those that wait in a collective should have beaten once more than one that
    has not come to it. So beat several times a step: when it begins, and when its batch is there.
    """

    def __init__(
        self,
        world: World,
        deadline_seconds: float,
        *,
        host: str,
        port: int,
        on_lost: Callable[[Failure], object] = end_process,
    ) -> None:
        """`on_lost` is called once, in the watching thread."""
        self.state = "starting"
        """What this rank is about, in a word; others name it."""
        self._world, self._host, self._port, self._on_lost = world, host, port, on_lost
        self._deadline_seconds, self._round_seconds = deadline_seconds, min(ROUND_SECONDS, deadline_seconds / 10)
        self._place, self._armed, self._failed = (0, 0), False, ""
        self._clock, self._met_at, self._count, self._trouble = 0.0, 0.0, 0, ""
        self._sightings = {rank: Sighting() for rank in range(world.size)}
        self._closing, self._wake, self._said = threading.Event(), threading.Event(), threading.Event()
        self._talking = threading.Thread(target=self._talk, name="pulse", daemon=True)
        self._watching = threading.Thread(target=self._watch, name="pulse-watch", daemon=True)

    @classmethod
    def from_environment(cls, world: World, deadline_seconds: float) -> "Pulse":
        """A pulse that meets the others where torchrun says."""
        return cls(world, deadline_seconds, host=os.environ["MASTER_ADDR"], port=int(os.environ["MASTER_PORT"]))

    def start(self) -> "Pulse":
        self._talking.start()
        self._watching.start()
        return self

    def beat(self, step: int) -> None:
        """The loop gets on. All ranks beat at the same points of a step."""
        last, point = self._place
        self._place = (step, point + 1 if step == last else 0)

    def arm(self, steady: bool = True) -> None:
        """From now on not getting on counts after the deadline: start-up is over. (Or it is not: see `excused`.)"""
        self.state, self._armed = "training" if steady else "starting", steady

    @contextmanager
    def excused(self, state: str) -> Iterator[None]:
        """What is done inside may take long (saving, the first steps of a shape): 12 times the deadline."""
        before = self.state, self._armed
        self._armed, self.state = False, state
        try:
            yield
        finally:
            self.state, self._armed = before

    def note_failure(self, message: str) -> bool:
        """Tell the others that this rank fails by its own fault, and why; gives whether that was sent. Waits a little.

        A rank that fails because another did calls `close` instead: it is not to blame.
        """
        self._failed = one_line(message) or "it failed"
        self._wake.set()
        return self._said.wait(LAST_WORD_SECONDS)

    def missing(self, patience_seconds: float) -> list[tuple[int, str]]:
        """After a communication error: whose fault it may be, each rank with its own word or the lack of any.

        Waits until somebody has said that he fails, or was silent for some rounds; empty when the patience ends first.
        """
        end = time.monotonic() + patience_seconds
        while True:
            if failed := failed_ranks(self._world.rank, self._sightings):
                return list(failed.items())
            silence = SILENT_ROUNDS * self._round_seconds
            if silent := silent_ranks(self._world.rank, self._sightings, self._met_at, silence, float("inf")):
                return [(rank, "no sign of life") for rank in silent]
            if time.monotonic() > end:
                return []
            time.sleep(self._round_seconds / 2)

    def close(self) -> None:
        """Take leave: the others wait for this rank no more. Bounded, also when the network is cut."""
        self._closing.set()
        self._wake.set()
        if self._talking.is_alive():
            self._talking.join(LAST_WORD_SECONDS)

    def _talk(self) -> None:
        store: Store | None = None
        while True:
            closing = self._closing.is_set()  # asked first: the last round tells the others
            try:
                store = store or self._connect()
                self._exchange(store, closing)
                self._trouble = ""
            except Exception as error:  # of any kind: whatever it is, the watcher must hear of it
                self._trouble, store = one_line(f"{type(error).__name__}: {error}", 200), None
            if closing:
                return
            self._wake.wait(self._round_seconds)
            self._wake.clear()

    def _connect(self) -> Store:
        timeout = timedelta(seconds=self._deadline_seconds)
        return PrefixStore("pulse", TCPStore(self._host, self._port, is_master=False, timeout=timeout))

    def _exchange(self, store: Store, closing: bool) -> None:
        """Say our sign and read the others'. The watcher's times are those of whole rounds."""
        step, point = self._place
        self._count += 1
        sign = Sign(self._count, step, point, self.state, self._armed, closing, self._failed)
        store.set(str(self._world.rank), sign.to_text())
        seen = [rank for rank, sighting in self._sightings.items() if sighting.sign or store.check([str(rank)])]
        texts = store.multi_get([str(rank) for rank in seen])  # would wait for a key that is not there
        now = self._clock
        for rank, text in zip(seen, texts, strict=True):
            self._sightings[rank] = self._sightings[rank].after(Sign.from_text(text), now)
        self._met_at = now
        if sign.failed:
            self._said.set()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closing.wait(self._round_seconds):
            now = time.monotonic()
            self._clock += min(
                now - last, SILENT_ROUNDS * self._round_seconds
            )  # a longer gap: this process stood still
            last = now
            if failure := self._unreachable() or self._judge():
                self._on_lost(replace(failure, time=time.time(), process=os.getpid(), exit_code=1))
                return

    def _judge(self) -> Failure | None:
        """By the last whole round: while our own connection hangs, the others' silence means nothing."""
        return judge(self._world.rank, dict(self._sightings), self._met_at, self._deadline_seconds)

    def _unreachable(self) -> Failure | None:
        if self._clock - self._met_at <= self._deadline_seconds:
            return None
        trouble = f" ({self._trouble})" if self._trouble else ""
        where = f"{self._host}:{self._port} on node 0"
        message = f"rank {self._world.rank} has not reached {where} for {self._deadline_seconds:g} s{trouble}"
        return Failure(self._world.rank, "lost", message)
