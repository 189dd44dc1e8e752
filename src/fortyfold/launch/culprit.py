"""Whose fault it was. When one rank fails, the others fail after it: one of all these failures is the cause."""

from fortyfold.spec.failure import Ending, Failure, Kind

_ORDER: tuple[tuple[Kind, ...], ...] = (
    ("UserError", "RunFailed"),  # never another rank's fault
    ("killed", "gone"),  # others may have noticed first, and said so
    ("exception", "lost"),
    ("consequence",),
    ("ended",),
)


def find_culprit(ending: Ending) -> Failure | None:
    """The failure that the others followed from; among equals the earliest. None if no rank failed."""
    for kinds in _ORDER:
        if alike := [failure for failure in ending.failures if failure.kind in kinds]:
            return min(alike, key=lambda failure: (failure.time, failure.rank))
    return None


def tell(culprit: Failure | None, ending: Ending) -> str:
    """The failure in a line that begins with the rank."""
    if culprit is None:
        return ending.trouble
    if culprit.kind in ("UserError", "RunFailed"):
        return culprit.message
    if culprit.kind == "lost":  # its message names the ranks that were lost, not the one that noticed
        return culprit.message
    verb = " failed: " if culprit.kind in ("exception", "consequence") else " "
    return f"rank {culprit.rank}{verb}{culprit.message}"
