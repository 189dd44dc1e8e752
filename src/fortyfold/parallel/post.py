"""Messages between ranks that threads beside the training loop may send: through the store of the ranks' meeting point.

Collectives are no good there: they must come in the same order on every rank.
"""

import json
import os
import time
from collections.abc import Iterator
from typing import Any

from torch._C._distributed_c10d import TCPStore  # the public name has no type
from torch.distributed.distributed_c10d import PrefixStore, Store

POLL_SECONDS = 0.02
CHUNK_BYTES = 4 * 2**20  # a store takes 8 MiB at once


def open_store(prefix: str) -> Store:
    """A connection of its own: a store waits for one answer at a time."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore(f"fortyfold/{prefix}", TCPStore(*place, is_master=False))


class Post:
    """Tells rank 0 what each rank has to say on a subject. One thread at a time."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._store = open_store("post")

    def collect(self, subject: str, message: Any) -> list[Any] | None:
        """On rank 0 every rank's message, in their order, as soon as all are there; elsewhere None, at once.

        A rank that never sends one is parallel/pulse.py's business.
        """
        self._store.set(f"{subject}/{self._rank}", json.dumps(message))
        if self._rank:
            return None
        keys = [f"{subject}/{rank}" for rank in range(self._num_ranks)]
        while not self._store.check(keys):
            time.sleep(POLL_SECONDS)
        messages = [json.loads(message) for message in self._store.multi_get(keys)]
        for key in keys:
            self._store.delete_key(key)
        return messages

    def send(self, subject: str, data: bytes) -> None:
        """Leave `data` for rank 0; to be followed by a `collect` that tells of it."""
        for number, start in enumerate(range(0, len(data), CHUNK_BYTES)):
            piece = data[start : start + CHUNK_BYTES]
            self._store.set(f"{subject}/{self._rank}/{number}", piece)  # type: ignore[arg-type]

    def fetch(self, subject: str, rank: int, num_bytes: int) -> Iterator[bytes]:
        """On rank 0: what that rank has sent, piece by piece."""
        for number in range(-(-num_bytes // CHUNK_BYTES)):
            yield self._store.get(key := f"{subject}/{rank}/{number}")
            self._store.delete_key(key)
