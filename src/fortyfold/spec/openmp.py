"""What keeps torch's CPU threads from spinning: environment variables, to be set before torch is imported."""

from collections.abc import MutableMapping


def calm(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP threads sleep soon when they wait for one another, unless the user chose otherwise.

    By default they spin, and where anything else wants the cores (a second run, a full node) the one they
    wait for does not get on: two runs of `tiny` on two cores were 6 times slower. Alone, a run is as fast
    (docs/findings.md, 2026-11-16).
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "1000")
