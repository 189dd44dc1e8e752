"""When to save, and saving beside the loop: one background thread writes, the loop only copies.

A save that falls due while the last one is still being written is made up for as soon as that one ends, so
that the loop need not wait and no more than two copies of the training state are in host memory. An error
while writing surfaces at the next `poll`.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from fortyfold.engine import checkpoint
from fortyfold.engine.checkpoint import Snapshot
from fortyfold.spec import recipe
from fortyfold.spec.errors import RunFailed
from fortyfold.spec.run_dir import RunDir


class Saver:
    def __init__(self, run_dir: RunDir, policy: recipe.Checkpoint, step: int) -> None:
        self._run_dir = run_dir
        self._policy = policy
        self._last_step = step
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._writing: Future[Path] | None = None
        self._last_time = time.monotonic()
        self._owed = False
        self.changed = False  # whether there is anything to save; the loop sets it

    def due(self, step: int, epochs_done: int | None) -> bool:
        """Whether the policy asks for a save after `step` steps (`epochs_done`: at the end of that epoch)."""
        policy, minutes = self._policy, (time.monotonic() - self._last_time) / 60
        self._owed = self._owed or (
            self.changed
            and (
                0 < policy.every_steps <= step - self._last_step
                or 0 < policy.every_minutes <= minutes
                or (policy.every_epochs > 0 and epochs_done is not None and epochs_done % policy.every_epochs == 0)
            )
        )
        return self._owed and self._writing is None

    def save(self, take: Callable[[], Snapshot]) -> None:
        """Copy with `take`, then write in the background."""
        self.wait()
        snapshot = take()
        self.changed = self._owed = False
        self._last_step = snapshot.progress.step
        self._last_time = time.monotonic()
        self._writing = self._pool.submit(self._write, snapshot)

    def poll(self) -> Path | None:
        """The checkpoint that was finished since the last call, if any; raises what went wrong with it."""
        return self.wait() if self._writing is not None and self._writing.done() else None

    def wait(self) -> Path | None:
        """Until the checkpoint in the making is on the disk; gives its folder."""
        if self._writing is None:
            return None
        writing, self._writing = self._writing, None
        return writing.result()

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def _write(self, snapshot: Snapshot) -> Path:
        try:
            path = checkpoint.write(self._run_dir, snapshot)
        except OSError as error:
            whole = checkpoint.names(self._run_dir)
            kept = f"{whole[0]} is intact and the same command goes on from it" if whole else "there is none before it"
            raise RunFailed(
                f"cannot save {snapshot.name} to {self._run_dir.checkpoints}: {error.strerror}; {kept}"
            ) from None
        checkpoint.prune(self._run_dir, self._policy.keep, snapshot.progress.best_checkpoint)
        return path
