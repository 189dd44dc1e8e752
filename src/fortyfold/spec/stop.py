"""Asking a run to stop. A signal handler only sets a flag; the loop looks at it between two steps.

SIGINT (Ctrl-C) means cancelled. SIGUSR1 is the warning that the time is nearly over. SIGTERM says only that
somebody wants an end; the launcher that sent it, or asks its scheduler, knows why. SIGHUP: the terminal is gone.
"""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fortyfold.spec.beside import beside
from fortyfold.spec.run_dir import RunDir, write_json

LOOK_SECONDS = 1.0
REASONS = {
    signal.SIGINT: "cancelled",
    signal.SIGTERM: "terminated",
    signal.SIGUSR1: "out of time",
    signal.SIGHUP: "hung up",
}


class StopFlag:
    """Set by the first signal; later ones change nothing."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._reason: str | None = None
        self._terminals: list[int] = []

    def listen(self) -> "StopFlag":
        """Take over these signals for the rest of this process (call it in the main thread)."""
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        for number in REASONS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup's wish
                signal.signal(number, self._set)
        return self

    @contextmanager
    def listening(self) -> Iterator["StopFlag"]:
        """Listen inside the context, where that is possible: only a process's main thread hears signals."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.getsignal(number) for number in REASONS}
        try:
            yield self.listen()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def ask(self, number: int, reason: str | None = None) -> None:
        """As if that signal had come; `reason` says more than the signal does."""
        if self.signal is None:
            self.signal, self._reason = signal.Signals(number), reason

    def ask_by_name(self, name: str, reason: str | None = None) -> None:
        """The same on behalf of another process."""
        self.ask(signal.Signals[name], reason)

    def ask_if(self, number: int | None) -> None:
        if number is not None:
            self.ask(number)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.ask(number)
        if number == signal.SIGHUP:  # what is said from now on has no reader, and must not fail for that
            for descriptor in self._terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)

    @property
    def requested(self) -> bool:
        return self.signal is not None

    @property
    def reason(self) -> str:
        assert self.signal is not None
        return self._reason or REASONS[self.signal]


def write_request(run_dir: RunDir, stop: StopFlag) -> None:
    """Ask the ranks of a run, wherever they are, for what this process was asked for."""
    assert stop.signal is not None
    write_json(run_dir.stop_request, {"signal": stop.signal.name, "reason": stop.reason})


def stop_reason(run_dir: RunDir, number: signal.Signals) -> str:
    """Why ranks that agreed on that signal stop: who asked for it may know more than the signal says."""
    try:
        request = json.loads(run_dir.stop_request.read_text(encoding="utf-8"))
        return str(request["reason"]) if request["signal"] == number.name else REASONS[number]
    except (OSError, ValueError, KeyError, TypeError):
        return REASONS[number]


def read_request(run_dir: RunDir) -> signal.Signals | None:
    """The signal that a file in the run directory stands for; None without one."""
    try:
        return signal.Signals[json.loads(run_dir.stop_request.read_text(encoding="utf-8"))["signal"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def hearing_requests(run_dir: RunDir, stop: StopFlag) -> Iterator[None]:
    """Inside, a request in the run directory is as good as a signal: a thread looks for one about once a second."""

    def look(over: threading.Event) -> None:
        stop.ask_if(read_request(run_dir))
        while not over.wait(LOOK_SECONDS):
            stop.ask_if(read_request(run_dir))

    with beside("stop-requests", look):
        yield
