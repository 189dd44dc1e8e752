"""What ranks agree on beside training: to stop, that a loss is not finite, that a save is due. All of it is noticed by
one of them and must be acted on by all in the same step (parallel/accord.py); a single rank agrees with itself."""

import signal

from fortyfold.engine.journal import Journal, NotFinite
from fortyfold.engine.saver import Saver
from fortyfold.parallel.accord import Accord
from fortyfold.spec.stop import StopFlag

_BEYOND = 2**62  # more than any step: the earliest step is the largest word


class Agreement:
    def __init__(self, accord: Accord, stop: StopFlag, journal: Journal, saver: Saver, clock: bool) -> None:
        self._accord, self._stop, self._journal, self._saver = accord, stop, journal, saver
        self._clock = clock  # whether this rank's clock tells when a save is due
        self.stopping: signal.Signals | None = None
        self.overdue = 0  # for Saver.due

    def hear(self) -> None:
        """Once between two steps. Raises NotFinite if any rank's loss was not."""
        overdue = self._saver.overdue if self._clock else 0
        agreed = self._accord.tick([self._stop.signal or 0, self._not_finite(), overdue])
        if agreed is not None:
            number, not_finite, self.overdue = agreed
            self.stopping = signal.Signals(number) if number else None
            self._raise(not_finite)

    def stops(self) -> bool:
        """The same between the batches of an evaluation; whether to end it."""
        self.hear()
        return self.stopping is not None

    def change_pace(self) -> None:
        """Before an evaluation, and after it."""
        self._accord.start_over()

    def require_finite(self) -> None:
        """Before a save: raises NotFinite on all ranks if any rank's loss was not. They wait for one another."""
        self._raise(self._accord.now([self._not_finite()])[0])

    def _not_finite(self) -> int:
        found = self._journal.not_finite
        return _BEYOND - found.step if found else 0

    def _raise(self, word: int) -> None:
        if word:
            step, mine = _BEYOND - word, self._journal.not_finite
            raise mine if mine and mine.step == step else NotFinite(step, float("nan"))
