"""A learner's state and a checkpoint's: taking the one for the other, on one rank or on several.

What a rank has for itself: its generators; with several ranks its statistics of normalisation layers; with gossip and
local SGD its whole replica. The rest is the same on every rank, and rank 0 saves it.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fortyfold.data.order import hash_ids
from fortyfold.engine.checkpoint import Own, Snapshot
from fortyfold.engine.learner import Learner
from fortyfold.engine.progress import Progress
from fortyfold.engine.state_tree import Tensors, flatten, unflatten


def take_snapshot(
    name: str,
    learner: Learner,
    progress: Progress,
    as_evaluated: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Snapshot:
    """Copy everything to host memory. The training loop stands still for this, and only for this.

    Inside `as_evaluated` the networks are those that are evaluated: of several ranks, their mean.
    """
    ranks, strategy = learner.ranks, learner.strategy
    optimizer, tensors = flatten(_optimizer_state(learner), "optim")
    training = {"optimizer": optimizer, "scaler": learner.scaler.state() if learner.scaler else None}
    remembered, strategy_tensors = flatten(strategy.state(), "strategy")
    own_tensors = {f"rng/{device}": state for device, state in _generator_states().items()}
    if ranks.many:
        own_tensors |= _networks_state(learner, whole=strategy.replicates)
    if strategy.replicates:
        own, shared = Own(_to_host(own_tensors | tensors), training), Own(strategy_tensors, {})
    else:
        own, shared = Own(_to_host(own_tensors), {}), Own(tensors | strategy_tensors, training)
    with as_evaluated():
        networks = {name: _to_host(network.state_dict()) for name, network in learner.networks.items() if ranks.first}
    return Snapshot(
        name=name,
        progress=Progress.from_json(json.loads(json.dumps(progress.to_json()))),
        model=networks.get("", {}),
        ema=networks.get("ema_"),
        training=_to_host(shared.tensors) if ranks.first else {},
        plain={**shared.plain, "strategy": remembered},
        own=(own,),
        rank=ranks.world.rank,
        num_ranks=ranks.world.size,
        replicates=strategy.replicates,
    )


def restore(snapshot: Snapshot, learner: Learner, seed: int = 0) -> Progress:
    """Put a snapshot's state into the learner and the generators; gives its progress.

    With another number of ranks than it was saved with, all start from the mean: of statistics, or of replicas.
    """
    step, same = snapshot.progress.step, snapshot.num_ranks == learner.ranks.world.size
    for name, network in learner.networks.items():
        saved = snapshot.ema if name else snapshot.model
        assert saved is not None
        network.load_state_dict(saved | _own_network(snapshot, name, same))
    training = _mean(snapshot.own) if snapshot.replicates else Own(snapshot.training, snapshot.plain)
    _restore_optimizer(learner, unflatten(training.plain["optimizer"], training.tensors))
    if learner.scaler is not None:
        learner.scaler.restore(training.plain["scaler"])
    remembered = unflatten(snapshot.plain["strategy"], snapshot.training)
    if remembered or learner.strategy.replicates:
        learner.strategy.restore(remembered, step)
    if same:
        _restore_generators(snapshot.own[0].tensors)
    else:
        seed_generators(seed, learner.ranks.world.rank, step)
    return snapshot.progress


def seed_generators(seed: int, rank: int, step: int) -> None:
    """Ranks draw dropout and the like each for itself."""
    torch.manual_seed(int(hash_ids(torch.tensor([rank]).numpy(), seed, step)[0]) % 2**63)


def _networks_state(learner: Learner, whole: bool) -> Tensors:
    """The networks' own tensors: all, or those that differ between ranks although the weights do not."""
    own = {}
    for name, network in learner.networks.items():
        shared = set() if whole else {key for key, _ in network.named_parameters(remove_duplicate=False)}
        state = network.state_dict()
        own.update({f"{_folder(name)}/{key}": tensor for key, tensor in state.items() if key not in shared})
    return own


def _own_network(snapshot: Snapshot, name: str, same: bool) -> Tensors:
    prefix = f"{_folder(name)}/"
    if not same:
        return {}
    tensors = snapshot.own[0].tensors
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _folder(network: str) -> str:
    return "ema" if network else "model"


def _mean(replicas: Sequence[Own]) -> Own:
    """Of optimiser state: floating tensors are averaged over those that have them, the rest is the first one's."""
    first, keys = replicas[0], {key for own in replicas for key in own.tensors if key.startswith("optim/")}
    tensors = {}
    for key in keys:
        found = [own.tensors[key] for own in replicas if key in own.tensors]
        mean = found[0].is_floating_point() and len(found) > 1
        tensors[key] = torch.stack(found).mean(0) if mean else found[0]
    return Own(tensors, first.plain)


def _to_host(tensors: Tensors) -> Tensors:
    return {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in tensors.items()}


def _generator_states() -> Tensors:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_generators(states: Tensors) -> None:
    torch.set_rng_state(states["rng/cpu"])
    if torch.cuda.is_available() and "rng/cuda" in states:
        torch.cuda.set_rng_state(states["rng/cuda"])


def _parameter_names(learner: Learner) -> list[str]:
    """Names in the order in which the optimiser counts its parameters."""
    name_of = {id(parameter): name for name, parameter in learner.model.named_parameters()}
    return [name_of[id(parameter)] for group in learner.optimizer.param_groups for parameter in group["params"]]


def _optimizer_state(learner: Learner) -> dict[str, Any]:
    """The optimiser's own state, with parameters by name and without their lists."""
    names, state = _parameter_names(learner), learner.optimizer.state_dict()
    by_name = {names[index]: values for index, values in state["state"].items()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    return {**state, "state": by_name, "param_groups": groups}


def _restore_optimizer(learner: Learner, state: dict[str, Any]) -> None:
    index_of = {name: index for index, name in enumerate(_parameter_names(learner))}
    lists = [group["params"] for group in learner.optimizer.state_dict()["param_groups"]]
    groups = [{**saved, "params": params} for saved, params in zip(state["param_groups"], lists, strict=True)]
    by_index = {index_of[name]: values for name, values in state["state"].items()}
    learner.optimizer.load_state_dict({**state, "state": by_index, "param_groups": groups})
