"""What learns: the network and all that changes with it. Its whole state goes into a checkpoint."""

from collections.abc import Callable

import torch
import torch._dynamo

from fortyfold.engine.device import DeviceBatch
from fortyfold.engine.ema import Ema
from fortyfold.engine.loss import build_loss, weighted_mean
from fortyfold.engine.optimizer import build_optimizer, set_learning_rate
from fortyfold.engine.precision import Scaler, autocast
from fortyfold.parallel.ranks import Ranks
from fortyfold.parallel.strategies import Parts, build_strategy
from fortyfold.spec.recipe import Recipe

_MOST_SHAPES = 1000


class Learner:
    """`model` has its first weights, and is on the device where it trains; with several `ranks`, one learns on each."""

    def __init__(self, model: torch.nn.Module, recipe: Recipe, ranks: Ranks | None = None) -> None:
        self._optim, self._precision = recipe.optim, recipe.precision
        self._device = next(model.parameters()).device
        self._criterion = build_loss(recipe.loss)
        self.ranks = ranks or Ranks()
        self.model = model
        self.optimizer = build_optimizer(model, recipe.optim)
        self.scaler = Scaler(recipe.precision, self._device) if recipe.precision.dtype == "fp16" else None
        self.ema = Ema(model, recipe.ema) if recipe.ema.decay else None
        parts = Parts(
            model=model,
            optimizer=self.optimizer,
            spec=recipe.strategy,
            ranks=self.ranks,
            px=recipe.all_phases()[0].px or 1,
            whole_gradient=self.scaler is not None or recipe.optim.clips,
        )
        self.strategy = build_strategy(parts)
        self._forward: Callable[[torch.Tensor], torch.Tensor] = self.strategy.wrap(model)

    @property
    def networks(self) -> dict[str, torch.nn.Module]:
        """What can be evaluated, by the first part of its scores' names."""
        return {"": self.model} | ({"ema_": self.ema.module} if self.ema is not None else {})

    def compile(self) -> None:
        """Compile the network for training, for each shape of a batch anew: a run that was resumed must not round
        otherwise because it met the shapes in another order."""
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _MOST_SHAPES)  # beyond it, torch would not compile at all
        self._forward = self.strategy.wrap(torch.compile(self.model, dynamic=False))

    def backward(self, batch: DeviceBatch, lr: float, accumulate: int = 1, places: float | None = None) -> torch.Tensor:
        """The batch's gradients, in `accumulate` micro-batches one after another, which add up. Gives the loss, still
        on the device. Changes nothing but gradients, the statistics of normalisation layers, and generators; with
        gossip, weights too.

        `places` is the number of images a step over all ranks, divided by the ranks: then the mean of the ranks'
        gradients is that of the whole batch, whatever each one's share. By default, those of `batch`.
        """
        set_learning_rate(self.optimizer, lr)
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self._device)
        micro_batches = list(batch.cut(accumulate))
        for number, micro_batch in enumerate(micro_batches, start=1):
            with self.strategy.micro_batch(last=number == len(micro_batches)):
                loss += self._backward(micro_batch, places or len(batch))
        return loss

    def update(self, number: int) -> None:
        """Step `number` (from 1) of the run: move the weights, and their average. Only fp16 waits for the device."""
        self.strategy.update(self._step_optimizer)
        if self.ema is not None:
            self.ema.update(number)

    def _step_optimizer(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale(self.optimizer)
        self._clip()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)

    def _backward(self, batch: DeviceBatch, num_places: float) -> torch.Tensor:
        with autocast(self._precision, self._device):
            logits = self._forward(batch.images)
        loss = weighted_mean(self._criterion(logits, batch), batch.weights, num_places)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.detach()

    def _clip(self) -> None:
        if self._optim.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._optim.clip_norm)
        if self._optim.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.model.parameters(), self._optim.clip_value)
