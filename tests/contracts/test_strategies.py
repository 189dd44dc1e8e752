"""Every strategy on three ranks: a run that ended abruptly goes on to the same bytes. On one rank it does nothing."""

from pathlib import Path

import kill_resume
import pytest
import torch
from learners import make_model, recipe, train_steps
from rank_pool import RankPool

from fortyfold.engine.learner import Learner
from fortyfold.parallel.strategies import require_strategy
from fortyfold.spec import plugin
from fortyfold.spec.errors import UserError
from fortyfold.spec.run_dir import RunDir

NAMES = plugin.names("fortyfold.parallel.strategies")
CHANGES = {"global_batch": 8, "epochs": 2, "checkpoint.every_steps": 2, "ema.decay": 0.9, "model.drop_path_rate": 0.2}


@pytest.mark.parametrize("name", NAMES)
def test_an_abrupt_end_changes_nothing(three_ranks: RankPool, few_data: Path, tmp_path: Path, name: str) -> None:
    for out, kill_after in (("calm", None), ("struck", 5), ("struck", None)):
        answers = three_ranks.run(
            "train_tiny", data=str(few_data), out=str(tmp_path / out), changes={**CHANGES, "strategy.name": name},
            kill_after=kill_after,
        )  # fmt: skip
        assert all(answer == answers[0] for answer in answers)
        assert answers[0].get("finished", False) == (kill_after is None)
    assert kill_resume.fingerprint(RunDir(tmp_path / "struck")) == kill_resume.fingerprint(RunDir(tmp_path / "calm"))


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_has_nobody_to_agree_with(name: str) -> None:
    learners = [Learner(make_model(), recipe(strategy={"name": each})) for each in ("allreduce", name)]
    for learner in learners:
        torch.manual_seed(0)
        train_steps(learner, 0, 3)
    one, other = (learner.model.state_dict() for learner in learners)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_wrong_name_lists_the_right_ones() -> None:
    with pytest.raises(UserError, match=r"no strategy 'gosip'.*did you mean gossip"):
        require_strategy("gosip")
