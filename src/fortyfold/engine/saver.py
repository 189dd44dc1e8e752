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
from fortyfold.parallel.post import Post
from fortyfold.spec import recipe
from fortyfold.spec.errors import RunFailed
from fortyfold.spec.run_dir import RunDir


class Saver:
    def __init__(
        self,
        run_dir: RunDir,
        policy: recipe.Checkpoint,
        step: int,
        post: Post | None = None,
        *,
        far: bool = False,
    ) -> None:
        self._run_dir = run_dir
        self._post = post  # with several ranks
        self._far = far
        self._policy = policy
        self._last_step = step
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._writing: Future[Path] | None = None
        self._last_time = time.monotonic()
        self._owed = False
        self.changed = False  # whether there is anything to save; the loop sets it

    @property
    def overdue(self) -> int:
        """When so many minutes have passed that one is due: what all ranks have to hear for that; else 0."""
        minutes = (time.monotonic() - self._last_time) / 60
        return self._last_step + 1 if 0 < self._policy.every_minutes <= minutes else 0

    def due(self, step: int, epochs_done: int | None, overdue: int | None = None) -> bool:
        """Whether the policy asks for a save after `step` steps (`epochs_done`: at the end of that epoch).

        Several ranks must answer alike, so what a rank's own clock or disk says does not count: `overdue` is what they
        agreed on (one that was heard before the last save holds no more), and the save before is waited for.
        By default the own clock counts.
        """
        policy = self._policy
        self._owed = self._owed or (
            self.changed
            and (
                0 < policy.every_steps <= step - self._last_step
                or (self.overdue if overdue is None else overdue) == self._last_step + 1
                or (policy.every_epochs > 0 and epochs_done is not None and epochs_done % policy.every_epochs == 0)
            )
        )
        return self._owed and (self._writing is None or self._post is not None)

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
            path = checkpoint.write(self._run_dir, snapshot, self._post, far=self._far)
        except OSError as error:
            whole = checkpoint.names(self._run_dir)
            kept = f"{whole[0]} is intact and the same command goes on from it" if whole else "there is none before it"
            raise RunFailed(
                f"cannot save {snapshot.name} to {self._run_dir.checkpoints}: {error.strerror}; {kept}"
            ) from None
        if snapshot.rank == 0:
            checkpoint.prune(self._run_dir, self._policy.keep, snapshot.progress.best_checkpoint)
        return path
