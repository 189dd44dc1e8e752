"""Pipelines that take turns: each in processes of its own, frozen while another one is timed.

A loader works ahead. Left running it would disturb the others and then hand out what it made meanwhile; so after
each turn its whole process group is stopped (SIGSTOP) where it stands, and goes on from there (SIGCONT) in its
next turn. A turn therefore times the steady state, without start-up, and turns may be as short as two batches.

Memory is the most that the pipeline's processes hold while they make all that they work ahead, as they do beside
a training step that is slower: anonymous and shared memory, each page counted once (PSS), above the bare process
with torch and timm imported. Mapped files (libraries, FFCV's data) are left out: they can be given back at any time.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil

POLL_SECONDS, MAX_POLLS = 0.2, 150


class Missing(Exception):
    """The pipeline's package is not installed; the message says which."""


class Player:
    """The parent's side: a pipeline that is frozen but in its turn."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
        )
        try:
            self._expect("bare")
            bare_bytes = self._held_bytes()
            answer = self._ask("open")
            if answer[0] == "missing":
                raise Missing(" ".join(answer[1:]))
            assert answer == ["ready"], answer
        except BaseException:
            self.close()
            raise
        self._bare_bytes = bare_bytes
        os.killpg(self._process.pid, signal.SIGSTOP)

    def turn(self, num_images: int) -> tuple[int, float]:
        """Images made, at least `num_images`, and the seconds that took."""
        os.killpg(self._process.pid, signal.SIGCONT)
        images, seconds = self._ask(str(num_images))
        os.killpg(self._process.pid, signal.SIGSTOP)
        return int(images), float(seconds)

    def memory_bytes(self) -> int:
        """Lets it run without taking a batch until it rests."""
        os.killpg(self._process.pid, signal.SIGCONT)
        largest, resting_polls = 0, 0
        for _ in range(MAX_POLLS):
            before = self._cpu_seconds()
            time.sleep(POLL_SECONDS)
            largest = max(largest, self._held_bytes())
            resting_polls = resting_polls + 1 if self._cpu_seconds() - before < 0.1 * POLL_SECONDS else 0
            if resting_polls == 3:
                break
        os.killpg(self._process.pid, signal.SIGSTOP)
        return largest - self._bare_bytes

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _ask(self, line: str) -> list[str]:
        print(line, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> list[str]:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().split()
        if not answer:
            raise SystemExit("a pipeline ended too early; its own words are above")
        return answer

    def _expect(self, word: str) -> None:
        answer = self._answer()
        assert answer == [word], answer

    def _held_bytes(self) -> int:
        return sum(_held_bytes(process.pid) for process in self._processes())

    def _cpu_seconds(self) -> float:
        return float(sum(sum(process.cpu_times()[:2]) for process in self._processes()))

    def _processes(self) -> list[psutil.Process]:
        main = psutil.Process(self._process.pid)
        return [main, *main.children(recursive=True)]


def play(pipeline: Callable[[], Iterator[int]], num_warm_images: int) -> None:
    """The child's side: opens the pipeline when told to, then times what each line asks for."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no reply
    _reply(replies, "bare")
    sys.stdin.readline()
    try:
        batches = pipeline()
        _take(batches, num_warm_images)
    except ImportError as error:
        _reply(replies, f"missing {error}")
        return
    _reply(replies, "ready")
    for line in sys.stdin:
        started = time.perf_counter()
        images = _take(batches, int(line))
        _reply(replies, f"{images} {time.perf_counter() - started}")


def _take(batches: Iterator[int], num_images: int) -> int:
    taken = 0
    while taken < num_images:
        taken += next(batches)
    return taken


def _reply(replies: IO[str], line: str) -> None:
    print(line, file=replies, flush=True)


def _held_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError):  # it ended
        return 0
    kilobytes = {name: int(amount) for name, amount, *_ in map(str.split, lines)}
    return 1024 * (kilobytes["Pss_Anon:"] + kilobytes["Pss_Shmem:"])
