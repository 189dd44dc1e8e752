"""What tests have ranks do (rank_pool.py). Each is run by every rank, and compares with what a single process does."""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from learners import make_model, recipe
from torch.nn import functional

from fortyfold.engine import checkpoint
from fortyfold.engine.device import DeviceBatch
from fortyfold.engine.learner import Learner
from fortyfold.engine.train import train
from fortyfold.parallel import Gossip, LocalSGD, accord
from fortyfold.parallel.ranks import Ranks, find_far
from fortyfold.parallel.sync_bn import synchronise
from fortyfold.spec.errors import RunFailed
from fortyfold.spec.recipe_file import load_recipe
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag
from fortyfold.topologies import load_topology

Step = Callable[[], object]


def network(seed: int = 0) -> torch.nn.Sequential:
    """With a branch that some steps leave unused, and channels-last memory."""
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.Flatten(),
        torch.nn.Linear(288, 32),
        torch.nn.Linear(32, 32),
        torch.nn.Linear(32, 4),
    )
    return layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def weight_of(model: torch.nn.Sequential, layer: int) -> torch.Tensor:
    weight = model[layer].weight
    assert isinstance(weight, torch.Tensor)
    return weight


def loss_of(model: torch.nn.Sequential, rank: int, step: int) -> torch.Tensor:
    """Of a batch that only (rank, step) decides. In odd steps the last layer but one is left out."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    images = torch.randn(5, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 4, (5,), generator=generator)
    hidden = model[:4](images)
    return functional.cross_entropy(model[5](hidden if step % 2 else model[4](hidden)), labels)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    spared = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": spared}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def gossip(
    ranks: Ranks, topology: str, in_backward: bool, sends_early: bool = True, accumulate: int = 1, steps: int = 7
) -> dict[str, Any]:
    """Gossip against D-PSGD written down plainly, of all ranks in one process: are the weights the same bits?"""
    model = network()
    optimizer = sgd(model)
    wrapped = Gossip(model, optimizer, topology, in_backward=in_backward, bucket_mb=0.02, ranks=ranks)
    turned_early = sent_early = 0
    for step in range(steps):
        for part in range(accumulate - 1):
            with wrapped.accumulating():
                loss_of(model, ranks.world.rank, step + 1000 * part).backward()
        loss_of(model, ranks.world.rank, step + 1000 * (accumulate - 1)).backward()
        turned_early += wrapped._next
        sent_early += sum(turn.sent for turn in wrapped._turns[: wrapped._next])
        wrapped.step()
        wrapped._sends_early = sends_early  # whatever this machine's pace would make of it
        optimizer.zero_grad()
    expected = _plain_gossip(ranks, topology, accumulate, steps)
    same = [torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True)]
    fresh = network()
    layouts = zip(model.parameters(), fresh.parameters(), strict=True)
    strides = [one.stride() == other.stride() for one, other in layouts]
    with wrapped.averaged():
        weights = weight_of(model, 0).detach().clone()
    mean_of_all = torch.tensor(ranks.gather(weight_of(model, 0).tolist())).mean(0)
    return {
        "same": all(same),
        "strides": all(strides),
        "turned_early": turned_early,
        "sent_early": sent_early,
        "average": torch.allclose(weights, mean_of_all, atol=1e-6),
        "restored": torch.equal(weight_of(model, 0), weight_of(expected, 0)),
        "unused_trained": not torch.equal(weight_of(model, 4), weight_of(fresh, 4)),
    }


def _plain_gossip(ranks: Ranks, topology: str, accumulate: int, steps: int) -> torch.nn.Sequential:
    peers, size = load_topology(topology), ranks.world.size
    models = [network() for _ in range(size)]
    optimizers = [sgd(model) for model in models]
    for step in range(steps):
        before = [[parameter.detach().clone() for parameter in model.parameters()] for model in models]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for part in range(accumulate):
                loss_of(model, rank, step + 1000 * part).backward()
            met = peers(rank, ranks.world, step)
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    if met:
                        parameter.mul_(1 - sum(peer.weight for peer in met))
                    for peer in met:
                        parameter.add_(before[peer.receive_from][number], alpha=peer.weight)
            optimizer.step()
    return models[ranks.world.rank]


def a_second_backward(ranks: Ranks) -> str:
    model = network()
    wrapped = Gossip(model, sgd(model), ranks=ranks, bucket_mb=0.02, in_backward=True)
    loss_of(model, 0, 0).backward()
    wrapped.step()
    loss_of(model, 0, 1).backward()
    try:
        loss_of(model, 0, 1).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def schedules_and_restarts(ranks: Ranks) -> bool:
    """Gossip with one of torch's learning-rate schedules; stopped, taken up by other objects, and gone on."""

    def parts() -> tuple[torch.nn.Sequential, torch.optim.Optimizer, Any]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def run(model: Any, optimizer: Any, schedule: Any, wrapped: Gossip, first: int, end: int) -> None:
        for step in range(first, end):
            loss_of(model, ranks.world.rank, step).backward()
            wrapped.step()
            optimizer.zero_grad()
            schedule.step()

    calm = parts()
    run(*calm, Gossip(*calm[:2], ranks=ranks, bucket_mb=0.02, in_backward=True), 0, 6)
    one = parts()
    wrapped = Gossip(*one[:2], ranks=ranks, bucket_mb=0.02, in_backward=True)
    run(*one, wrapped, 0, 3)
    wrapped.settle()
    saved = [part.state_dict() for part in (*one, wrapped)]
    other = parts()
    for part, state in zip(other, saved, strict=False):
        part.load_state_dict(state)
    again = Gossip(*other[:2], ranks=ranks, bucket_mb=0.02, same_start=False, in_backward=True)
    again.load_state_dict(saved[3])
    run(*other, again, 3, 6)
    return all(torch.equal(*pair) for pair in zip(calm[0].parameters(), other[0].parameters(), strict=True))


def local_sgd(ranks: Ranks, outer: str, together_steps: int = 0) -> dict[str, Any]:
    """Three ranks' steps and averages against the same in one process."""
    model = network()
    optimizer = sgd(model)
    wrapped = LocalSGD(model, optimizer, 3, outer=outer, together_steps=together_steps, ranks=ranks)
    agreed = []
    for step in range(7):
        optimizer.zero_grad()
        loss_of(model, ranks.world.rank, step).backward()
        wrapped.step()
        everywhere = ranks.gather(next(model.parameters()).flatten()[0].item())
        agreed.append(len(set(everywhere)) == 1)
    expected = _plain_local_sgd(ranks, outer, agreed)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    apart = max((one - other).detach().abs().max().item() for one, other in pairs)
    return {"agreed": agreed, "apart": apart}


def _plain_local_sgd(ranks: Ranks, outer: str, averaged: list[bool]) -> torch.nn.Sequential:
    models = [network() for _ in range(ranks.world.size)]
    optimizers = [sgd(model) for model in models]
    common = network()
    outside = torch.optim.SGD(common.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(7):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        if averaged[step]:
            with torch.no_grad():
                for shared, *own in zip(common.parameters(), *[model.parameters() for model in models], strict=True):
                    mean = torch.stack(list(own)).mean(0)
                    shared.grad = shared - mean
                    if outer == "average":
                        shared.copy_(mean)
                if outer == "nesterov":
                    outside.step()
                for model in models:
                    for parameter, shared in zip(model.parameters(), common.parameters(), strict=True):
                        parameter.copy_(shared)
    return models[ranks.world.rank]


def sync_bn(ranks: Ranks) -> dict[str, float]:
    """Normalisation over unequal shares against that over the whole batch: output, gradients, statistics."""
    torch.manual_seed(0)
    images = torch.randn(7, 3, 8, 8)
    whole, own = make_model(), synchronise(make_model(), torch.device("cpu"))
    for model in (whole, own):
        model[2] = torch.nn.Identity()  # type: ignore[operator]
    sizes = [7 // ranks.world.size + (rank < 7 % ranks.world.size) for rank in range(ranks.world.size)]
    start = sum(sizes[: ranks.world.rank])
    share = images[start : start + sizes[ranks.world.rank]]
    for _ in range(2):
        expected = whole(images)
        given = own(share)
    expected.square().sum().backward()
    given.square().sum().backward()
    for parameter in own.parameters():
        assert parameter.grad is not None
        ranks.sum(parameter.grad)
    pairs = zip(own.parameters(), whole.parameters(), strict=True)
    return {
        "output": (given - expected[start : start + len(share)]).detach().abs().max().item(),
        "gradient": max(
            (a.grad - b.grad).abs().max().item() / max(1.0, b.grad.abs().max().item())  # type: ignore[operator, union-attr]
            for a, b in pairs
        ),
        "statistics": max((a - b).abs().max().item() for a, b in zip(own.buffers(), whole.buffers(), strict=True)),
        "evaluating": (own.eval()(images) - whole.eval()(images)).detach().abs().max().item(),
    }


def gradient(ranks: Ranks, accumulate: int, compress: str = "none", drop: bool = False) -> float:
    """DDP's gradient of unequal shares against that of the whole batch, as the largest relative difference."""
    spec = recipe(strategy={"compress": compress, "bucket_mb": 0.01}, optim={"name": "sgd", "lr": 0.01})
    images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    labels, weights = torch.arange(8) % 4, torch.ones(8)
    weights[2] = 0.0  # an unreadable one

    def plain() -> torch.nn.Module:
        model = network()
        model[1] = torch.nn.Identity()
        if drop:  # a parameter that no step uses
            model.register_parameter("idle", torch.nn.Parameter(torch.zeros(3)))
        return model

    alone = Learner(plain(), recipe(optim={"name": "sgd", "lr": 0.01}))
    alone.backward(DeviceBatch(images, labels, weights), 0.01)
    together = Learner(plain(), spec.model_copy(update={"px": 8}), ranks)
    size, rank = ranks.world.size, ranks.world.rank
    own = slice(8 * rank // size, 8 * (rank + 1) // size)
    share = DeviceBatch(images[own], labels[own], weights[own])
    for _ in range(2):
        together.backward(share, 0.01, accumulate, 8 / size)
    apart = 0.0
    for one, other in zip(together.model.parameters(), alone.model.parameters(), strict=True):
        if other.grad is not None and one.grad is not None:
            apart = max(apart, ((one.grad - other.grad).abs().max() / other.grad.abs().max()).item())
    return apart


class Killed(Exception):
    pass


def train_tiny(
    ranks: Ranks, data: str, out: str, changes: dict[str, Any], kill_after: int | None = None,
    stop_after: tuple[int, int] | None = None, not_a_number: tuple[int, int] | None = None, hurried: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """`tiny` on all ranks. `kill_after` ends it abruptly after so many steps; `stop_after` (rank, step) asks one rank
    to stop; `not_a_number` (rank, step) spoils one rank's loss. `hurried` ranks agree at every step."""
    spec = load_recipe("tiny", {"data.root": data, "data.demo": None, **changes})
    stop, whole, backward = StopFlag(), Learner.update, Learner.backward

    def update(self: Learner, number: int) -> None:
        whole(self, number)
        if number == kill_after:
            raise Killed
        if stop_after and tuple(stop_after) == (ranks.world.rank, number):
            stop.ask(15)

    def spoiling(self: Learner, *arguments: Any) -> torch.Tensor:
        loss = backward(self, *arguments)
        spoiling_now = not_a_number and not_a_number[0] == ranks.world.rank and steps[0] == not_a_number[1]
        steps[0] += 1
        return loss * float("nan") if spoiling_now else loss

    steps, period = [0], accord.PERIOD_SECONDS
    accord.PERIOD_SECONDS = 0.0 if hurried else period
    Learner.update, Learner.backward = update, spoiling  # type: ignore[method-assign, assignment]
    try:
        outcome = train(spec, RunDir(Path(out)), stop, ["test"], ranks=ranks)
    except Killed:
        return {"killed": True}
    except RunFailed as error:
        return {"failed": str(error)}
    finally:
        Learner.update, Learner.backward = whole, backward  # type: ignore[method-assign]
        accord.PERIOD_SECONDS = period
    return {"finished": outcome.finished, "step": outcome.progress.step, "reason": outcome.reason}


def ticks_between_exchanges(ranks: Ranks) -> list[int]:
    """An evaluation is over, the next tick comes at once, and then steps of a hundredth of a second."""
    one = accord.Accord(ranks)
    one.start_over()
    heard = []
    for tick in range(accord.MOST_TICKS):
        if one.tick([0]) is not None:
            heard.append(tick)
        if len(heard) == 3:
            break
        time.sleep(0.01 if tick else 0.0)
    return [later - earlier for earlier, later in pairwise(heard)]


def train_by_the_api(ranks: Ranks, out: str, data: str) -> dict[str, Any]:
    """`fortyfold.train` as a script under torchrun calls it: own network, events heard on rank 0."""
    import fortyfold

    heard: list[str] = []
    spec = load_recipe("tiny", {"data.root": data, "data.demo": None, "epochs": 1})
    outcome = fortyfold.train(spec, out=out, on_event=lambda event: heard.append(event["kind"]))
    return {"finished": outcome.finished, "heard": heard}


def read_newest(ranks: Ranks, runs: list[str], nodes: list[int]) -> list[Any]:
    """Nodes of so many ranks, each rank with its own path of the run; gives far, apart and the checkpoint's step."""
    world = replace(ranks.world, node_sizes=tuple(nodes))
    run_dir = RunDir(Path(runs[world.rank]))
    found = find_far(replace(ranks, world=world), run_dir.launch)
    snapshot, _ = checkpoint.read_newest(run_dir, found, training=False)
    assert snapshot is not None
    return [found.far, found.apart, snapshot.progress.step]


def scores(ranks: Ranks, run: str) -> dict[str, list[float]]:
    from fortyfold.engine.scoring import open_scoring

    found = open_scoring(Path(run), None, None, False).run(lambda done, total: None, True, ranks)
    return {name: [score.num_images, score.top1, score.loss] for name, score in found.items()}


def learner_gossip(ranks: Ranks, changes: dict[str, Any], accumulate: int = 1) -> dict[str, bool]:
    """A learner that gossips on a ring against learners that know nothing of each other, mixed by hand."""
    alone = [Learner(network(), recipe(**changes)) for _ in range(ranks.world.size)]
    strategy = {"name": "gossip", "topology": "ring", "bucket_mb": 0.01}
    together = Learner(network(), recipe(**changes, strategy=strategy), ranks)
    peers = load_topology("ring")

    def batch(rank: int, step: int) -> DeviceBatch:
        generator = torch.Generator().manual_seed(100 * rank + step)
        images = torch.randn(6, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
        return DeviceBatch(images, torch.randint(0, 4, (6,), generator=generator), torch.ones(6))

    for step in range(5):
        together.backward(batch(ranks.world.rank, step), 0.05, accumulate)
        together.update(step + 1)
        before = [[parameter.detach().clone() for parameter in one.model.parameters()] for one in alone]
        for rank, one in enumerate(alone):
            one.backward(batch(rank, step), 0.05, accumulate)
            met = peers(rank, ranks.world, step)
            with torch.no_grad():
                for number, parameter in enumerate(one.model.parameters()):
                    parameter.mul_(1 - sum(peer.weight for peer in met))
                    for peer in met:
                        parameter.add_(before[peer.receive_from][number], alpha=peer.weight)
            one.update(step + 1)
    expected = alone[ranks.world.rank]
    pairs = {name: (network, expected.networks[name]) for name, network in together.networks.items()}
    return {
        name or "model": all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
        for name, (one, other) in pairs.items()
    }
