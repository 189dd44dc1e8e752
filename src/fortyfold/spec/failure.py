"""How a rank, and an attempt, ended: what workers, torchrun and the launcher tell each other, as JSON. No torch."""

import signal
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Kind = Literal["UserError", "RunFailed", "exception", "lost", "consequence", "killed", "gone", "ended"]
"""UserError, RunFailed: the two errors that end a run. exception: any other one of Python's.
lost: this rank noticed that `ranks` are not heard of, or do not get on. consequence: it failed because another did.
killed: by a signal; gone: exited with an error code; both without a word.
ended: by torchrun, after another had failed."""


@dataclass(frozen=True)
class Failure:
    """One rank that ended badly."""

    rank: int
    kind: Kind
    message: str = ""
    """One line. Of a wordless rank what is said after its name: was killed by…"""
    ranks: tuple[int, ...] = ()
    """Whose fault it is, where that is known to be others'."""
    traceback: str = ""
    time: float = 0.0
    process: int = 0
    exit_code: int = 0
    """Negative: the signal that killed it."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ranks": list(self.ranks)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Failure":
        """Raises KeyError, TypeError or ValueError for anything else."""
        if value["kind"] not in get_args(Kind):
            raise ValueError(f"no kind of failure: {value['kind']!r}")
        return cls(**value | {"ranks": tuple(value["ranks"])})


@dataclass(frozen=True)
class Ending:
    """How an attempt's workers on a node ended: the one line that torchrun's process writes."""

    failures: tuple[Failure, ...] = ()
    trouble: str = ""
    """Why torchrun itself could not go on."""
    port_taken: bool = False
    """Another process had the port by the time torchrun wanted it; nothing was started."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"failures": [failure.to_json() for failure in self.failures]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Ending":
        failures = tuple(Failure.from_json(failure) for failure in value["failures"])
        return cls(failures, value["trouble"], value["port_taken"])


def one_line(text: str, most: int = 600) -> str:
    """`text` without line breaks, cut where it gets too long to be read."""
    words = " ".join(text.split())
    return words if len(words) <= most else words[:most] + "…"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def name_ranks(ranks: tuple[int, ...] | list[int]) -> str:
    """ "rank 2", "ranks 0 and 3", "ranks 0, 3, 4 and 12 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks] if len(ranks) <= 8 else [*map(str, ranks[:6]), f"{len(ranks) - 6} more"]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
