"""Ranks killed at random moments, one inside a save: one command gets over it. The benchmark does it oftener."""

from pathlib import Path

import kill_resume
import pytest


@pytest.mark.parametrize(("procs", "strategy"), [(2, "allreduce"), (3, "gossip")])
def test_two_kills_change_nothing(tmp_path: Path, tiny_data: Path, procs: int, strategy: str) -> None:
    options = [f"strategy.name={strategy}"]
    kill_resume.drill_ranks(tmp_path, tiny_data, kills=2, seed=procs, procs=procs, options=options)
