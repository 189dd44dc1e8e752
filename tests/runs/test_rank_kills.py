"""Ranks killed at random moments, one inside a save: one command gets over it. The benchmark does it oftener."""

from pathlib import Path

import kill_resume


def test_two_kills_change_nothing(tmp_path: Path, tiny_data: Path) -> None:
    kill_resume.drill_ranks(tmp_path, tiny_data, kills=2, seed=3, procs=3, options=["strategy.name=gossip"])
