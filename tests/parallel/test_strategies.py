"""Gossip, local SGD, synchronised normalisation and DDP on three real ranks, against the same in one process."""

import pytest
from rank_pool import RankPool

from fortyfold.spec import plugin

TOPOLOGIES = plugin.names("fortyfold.topologies")


@pytest.mark.parametrize(("in_backward", "sends_early"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_gossip_is_decentralised_sgd_bit_for_bit(
    three_ranks: RankPool, topology: str, in_backward: bool, sends_early: bool
) -> None:
    for answer in three_ranks.run("gossip", topology=topology, in_backward=in_backward, sends_early=sends_early):
        assert answer["same"], "the weights differ from plain D-PSGD"
        assert answer["strides"], "parameters lost their memory order"
        assert answer["average"] and answer["restored"]
        assert answer["unused_trained"]
        assert (answer["turned_early"] > 0) == in_backward
        assert (answer["sent_early"] > 0) == (in_backward and sends_early)


def test_gossip_accumulates(three_ranks: RankPool) -> None:
    for answer in three_ranks.run("gossip", topology="ring", in_backward=True, accumulate=2):
        assert answer["same"] and answer["turned_early"] > 0


def test_a_second_backward_without_accumulating_is_told(three_ranks: RankPool) -> None:
    assert all("use `with gossip.accumulating():`" in told for told in three_ranks.run("a_second_backward"))


def test_gossip_with_schedules_goes_on_from_state_dicts(three_ranks: RankPool) -> None:
    assert three_ranks.run("schedules_and_restarts") == [True] * 3


@pytest.mark.parametrize("outer", ["average", "nesterov"])
def test_local_sgd_agrees_after_every_third_step(three_ranks: RankPool, outer: str) -> None:
    for answer in three_ranks.run("local_sgd", outer=outer):
        assert answer["agreed"] == [False, False, True, False, False, True, False]
        assert answer["apart"] < 1e-6


def test_local_sgd_begins_together(three_ranks: RankPool) -> None:
    for answer in three_ranks.run("local_sgd", outer="average", together_steps=2):
        assert answer["agreed"] == [True, True, False, False, True, False, False]
        assert answer["apart"] < 1e-6


def test_a_pace_without_work_does_not_put_off_the_next_exchange(three_ranks: RankPool) -> None:
    first, second = zip(*three_ranks.run("ticks_between_exchanges"), strict=True)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] <= 2 and second[0] <= 4


def test_synchronised_normalisation_is_that_of_the_whole_batch(three_ranks: RankPool) -> None:
    for answer in three_ranks.run("sync_bn"):
        assert all(apart < 1e-5 for apart in answer.values()), answer


@pytest.mark.parametrize(
    ("arguments", "most"),
    [
        ({"accumulate": 1}, 1e-5),
        ({"accumulate": 2}, 1e-5),
        ({"accumulate": 1, "drop": True}, 1e-5),
        ({"accumulate": 2, "compress": "bf16"}, 0.02),
        ({"accumulate": 1, "compress": "fp16"}, 0.002),
    ],
)
def test_the_gradient_of_unequal_shares_is_that_of_the_batch(
    three_ranks: RankPool, arguments: dict[str, int], most: float
) -> None:
    apart = three_ranks.run("gradient", **arguments)
    assert max(apart) < most and len(set(apart)) == 1
    if "compress" in arguments:
        assert min(apart) > 1e-5  # it was compressed


@pytest.mark.parametrize(
    ("changes", "accumulate"),
    [
        ({"optim": {"lr": 0.05, "weight_decay": 0.1}, "ema": {"decay": 0.9}}, 1),
        ({"optim": {"lr": 0.05, "clip_norm": 0.1, "decay_by_name": {"0.*": 0.3}}}, 2),  # by the replica's own norm
        ({"optim": {"lr": 0.05, "clip_value": 0.01}}, 1),
        ({"optim": {"name": "accumadamw", "lr": 0.05, "weight_decay": 0.1}}, 1),
        ({"optim": {"name": "lamb", "lr": 0.05}}, 1),  # looks at all parameters at once
        ({"optim": {"name": "lookahead_sgd", "lr": 0.05}}, 1),
        ({"optim": {"lr": 0.05}, "precision": {"dtype": "bf16"}}, 2),
        ({"optim": {"lr": 0.05}, "precision": {"dtype": "fp16"}}, 1),
    ],
    ids=str,
)
def test_a_learner_gossips_with_every_option(
    three_ranks: RankPool, changes: dict[str, object], accumulate: int
) -> None:
    for answer in three_ranks.run("learner_gossip", changes=changes, accumulate=accumulate):
        assert all(answer.values()), answer
        assert ("ema_" in answer) == ("ema" in changes)
