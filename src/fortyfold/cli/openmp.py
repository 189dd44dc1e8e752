"""Keeps torch's CPU threads from spinning. To be called before torch is imported."""

import os


def calm_openmp() -> None:
    """Let OpenMP threads sleep soon when they wait for one another, unless the user chose otherwise.

    By default they spin, and where anything else wants the cores (a second run, a full node) the one they
    wait for does not get on: two runs of `tiny` on two cores were 6 times slower. Alone, a run is as fast
    (docs/findings.md, 2026-11-16).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
