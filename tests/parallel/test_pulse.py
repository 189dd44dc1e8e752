"""Pulses of several ranks, each with its threads and its connection, in one process."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from unittest import mock

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fortyfold.parallel.pulse import Pulse
from fortyfold.spec.failure import Failure
from fortyfold.spec.world import World

DEADLINE = 1.0
LATEST = 3 * DEADLINE  # of a verdict, on a busy machine


class Ranks:
    """Pulses on one store, and what they said about each other."""

    def __init__(self, size: int, port: int, ways: dict[int, int]) -> None:
        self.verdicts: dict[int, Failure] = {}
        self.pulses = [
            Pulse(World(size, rank), DEADLINE, host="127.0.0.1", port=ways.get(rank, port), on_lost=self._note(rank))
            for rank in range(size)
        ]

    def _note(self, rank: int) -> Callable[[Failure], None]:
        return lambda failure: self.verdicts.update({rank: failure})

    def wait(self, *ranks: int) -> list[Failure]:
        """The verdicts of `ranks`, once they have all come."""
        wait_until(lambda: self.verdicts.keys() >= set(ranks))
        return [self.verdicts[rank] for rank in ranks]


def wait_until(holds: Callable[[], bool], seconds: float = LATEST) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


@contextmanager
def started(store: TCPStore, size: int, ways: dict[int, int] | None = None) -> Iterator[Ranks]:
    for rank in range(size):
        store.delete_key(f"pulse/{rank}")
    ranks = Ranks(size, store.port, ways or {})
    with ExitStack() as stack:
        for pulse in ranks.pulses:
            stack.callback(pulse.start().close)
        yield ranks


class Link:
    """A way to the store for one connection, until it is cut."""

    def __init__(self, port: int) -> None:
        self.cut = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._ends = [socket.create_connection(("127.0.0.1", port))]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        self._ends.append(self._server.accept()[0])
        for ends in (self._ends, self._ends[::-1]):
            threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                if self.cut.is_set():
                    return
                target.sendall(data)

    def close(self) -> None:
        for end in [*self._ends, self._server]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def frozen(pulse: Pulse) -> Iterator[None]:
    """As if this rank were stopped, for the others: it says nothing more."""
    thaw = threading.Event()
    with mock.patch.object(pulse, "_exchange", lambda *_: thaw.wait()):
        yield
        thaw.set()


def test_ranks_that_get_on_and_take_leave(store: TCPStore) -> None:
    with started(store, 3) as ranks:
        for pulse in ranks.pulses:
            pulse.arm()
        ranks.pulses[2].close()
        for step in range(12):
            for pulse in ranks.pulses:
                pulse.beat(step)
            time.sleep(DEADLINE / 8)
        assert ranks.verdicts == {}
        assert ranks.pulses[0].missing(0.1) == []


def test_a_stopped_rank_is_named_by_all_others(store: TCPStore) -> None:
    with started(store, 3) as ranks:
        wait_until(lambda: all(pulse._sightings[1].sign for pulse in ranks.pulses))
        begin = time.monotonic()
        with frozen(ranks.pulses[1]):
            assert ranks.pulses[0].missing(LATEST) == [(1, "no sign of life")]
            assert time.monotonic() - begin < DEADLINE
            for failure in ranks.wait(0, 2):
                assert failure.ranks == (1,) and failure.kind == "lost" and failure.time and failure.process
                assert failure.message == "rank 1 was lost: no sign of life for 1 s (starting, step 0)"
            assert time.monotonic() - begin > DEADLINE * 0.9


def test_a_stuck_beat_is_named_and_an_excused_one_is_not(store: TCPStore) -> None:
    with started(store, 2) as ranks:
        first, second = ranks.pulses
        for pulse in ranks.pulses:
            pulse.beat(7)
            pulse.arm()
        first.beat(7)  # waits in a collective, where the second has not come yet
        with second.excused("saving"):
            time.sleep(1.5 * DEADLINE)
            assert ranks.verdicts == {}
        for failure in ranks.wait(0, 1):
            assert failure.message == "rank 1 does not get on for 1 s (training, step 7)"


def test_a_failure_is_told_at_once(store: TCPStore) -> None:
    with started(store, 2) as ranks:
        assert ranks.pulses[1].note_failure("ValueError:\nno luck")
        assert ranks.pulses[0].missing(LATEST) == [(1, "ValueError: no luck")]
        assert ranks.verdicts == {}


def test_nobody_at_the_meeting_point(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    verdicts: list[Failure] = []
    pulse = Pulse(World(2, 1), DEADLINE, host="127.0.0.1", port=port, on_lost=verdicts.append).start()
    wait_until(lambda: bool(verdicts))
    pulse.close()
    pulse._talking.join()  # it gives up by itself, later than `close` waits
    assert verdicts[0].message.startswith(f"rank 1 has not reached 127.0.0.1:{port} on node 0 for 1 s")
    capfd.readouterr()  # torch's native code complains at length


def test_a_cut_link(store: TCPStore) -> None:
    """Nothing comes through and nothing is closed: sockets block. Each side says what it knows."""
    with Link(store.port) as link, started(store, 2, {1: link.port}) as ranks:
        wait_until(lambda: all(sighting.sign for sighting in ranks.pulses[0]._sightings.values()))
        link.cut.set()
        first, second = ranks.wait(0, 1)
        link.close()
    assert first.ranks == (1,) and first.message.startswith("rank 1 was lost: no sign of life")
    assert second.ranks == () and second.message.startswith("rank 1 has not reached")


def test_a_process_that_stood_still_blames_nobody(store: TCPStore) -> None:
    """All threads stop, as with SIGSTOP or a suspended machine: time that nobody watched does not count."""
    with started(store, 2) as ranks:
        wait_until(lambda: all(pulse._met_at for pulse in ranks.pulses))
        real, gap = time.monotonic, [0.0]
        with mock.patch("fortyfold.parallel.pulse.time.monotonic", lambda: real() + gap[0]):
            gap[0] = 3600.0
            time.sleep(DEADLINE / 2)
            assert ranks.verdicts == {}
