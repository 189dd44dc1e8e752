"""A node's line to the ssh launcher: its stdin and stdout, a value of JSON a line.

    launcher → node   {"plan": …}, {"secrets": {…}}, {"invitation": …}, {"signal": "SIGINT"}, {"alive": true}
    node → launcher   {"invitation": …}, {"note": for whoever reads along}, {"ended": the run's last word};
                      before that, where runs are kept on S3, {"keeping": true}, and if that failed {"unkept": true}

When the launcher ends, or is silent for long, the node ends: it gets some seconds to save, and no more.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from fortyfold.launch.meeting import Attend, Invitation
from fortyfold.spec.errors import RunFailed
from fortyfold.spec.stop import StopFlag

SILENT_SECONDS = 90.0
ALIVE_SECONDS = 5.0
ORPHAN_SECONDS = 8.0
KEEPING_SECONDS = 90.0  # the same of an instance, which has to send what it saved


class Wire:
    def __init__(self, stop: StopFlag) -> None:
        self._stop = stop
        self._words: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._heard_at = time.monotonic()
        self.orphan_seconds = ORPHAN_SECONDS
        for work in (self._listen, self._watch):
            threading.Thread(target=work, name="wire", daemon=True).start()

    def await_word(self, name: str, attend: Attend = lambda: None) -> Any:
        """The value of the next line, which must be of that name."""
        while True:
            attend()
            try:
                said, value = self._words.get(timeout=0.1)
            except queue.Empty:
                continue
            if said == name:
                return value
            raise RunFailed(f"the launcher says {said!r} instead of {name!r}")

    def await_invitation(self, attend: Attend) -> Invitation:
        return Invitation.from_json(self.await_word("invitation", attend))

    @staticmethod
    def tell(words: dict[str, Any]) -> None:
        with suppress(OSError):  # it is gone; what is to be done for that is done here (_end)
            print(json.dumps(words), flush=True)

    def publish(self, invitation: Invitation) -> None:
        self.tell({"invitation": invitation.to_json()})

    def note_end(self, word: str) -> None:
        self.tell({"ended": word})

    def _listen(self) -> None:
        for line in sys.stdin:
            self._heard_at = time.monotonic()
            for name, value in json.loads(line).items():
                if name == "signal":
                    self._stop.ask_by_name(value)
                elif name != "alive":
                    self._words.put((name, value))
        self._end()

    def _watch(self) -> None:
        while time.monotonic() - self._heard_at < SILENT_SECONDS:
            time.sleep(1.0)
        self._end()

    def _end(self) -> None:
        """Workers die with this process (spec/parent.py)."""
        self._stop.ask(signal.SIGTERM, "launcher lost")
        time.sleep(self.orphan_seconds)
        os._exit(1)
