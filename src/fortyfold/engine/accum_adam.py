"""AccumAdam and AccumAdamW: Adam whose moments take in the mean gradient of several steps.

Every step moves the weights, by the moments as they would be with this step's gradient. The moments themselves
take in the mean over `accum_iter` gradients, once every so many steps: they are as calm as those of a batch so many
times as large, which is what decentralised training with its small batches a rank wants. With `accum_iter` 1 it is
Adam. (Decent-DP's idea; AccumAdamW decouples the weight decay.)
"""

import math
from collections import defaultdict
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

Tensors = list[torch.Tensor]


class AccumAdam(torch.optim.Optimizer):
    decoupled = False
    steps_each_by_itself = True  # for parallel/gossip.py

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        accum_iter: int = 4,
    ) -> None:
        if not (all(0 <= beta < 1 for beta in betas) and eps >= 0 and accum_iter >= 1):
            raise ValueError(f"betas = {list(betas)}, eps = {eps}, accum_iter = {accum_iter}: this cannot be")
        settings = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "accum_iter": accum_iter}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move the weights; every `accum_iter` steps, the moments too."""
        assert closure is None
        for group in self.param_groups:
            at_step: dict[int, Tensors] = defaultdict(list)  # a parameter may have been unused in some steps
            for parameter in group["params"]:
                if parameter.grad is not None:
                    at_step[self._begin(parameter, group)].append(parameter)
            for number, parameters in at_step.items():
                self._move(parameters, number, group)

    def _begin(self, parameter: torch.Tensor, group: dict[str, Any]) -> int:
        """The number of this step of the parameter, from 1."""
        state = self.state[parameter]
        if not state:
            names = ("exp_avg", "exp_avg_sq") if group["accum_iter"] == 1 else ("exp_avg", "exp_avg_sq", "gradient_sum")
            state["step"] = 0
            state.update({name: torch.zeros_like(parameter) for name in names})
        state["step"] += 1
        return int(state["step"])

    def _move(self, parameters: Tensors, number: int, group: dict[str, Any]) -> None:
        (beta1, beta2), every, lr = group["betas"], group["accum_iter"], group["lr"]
        gradients: Tensors = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if group["weight_decay"]:
            if self.decoupled:
                torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
            else:
                gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        first, second = self._states(parameters, "exp_avg"), self._states(parameters, "exp_avg_sq")

        folds = -(-number // every)  # how often the moments take in a gradient, this step's included
        if every == 1:
            ahead, squares = first, second
        else:
            ahead, squares = ([moment.clone() for moment in moments] for moments in (first, second))
        _fold(ahead, squares, gradients, beta1, beta2)
        spread = torch._foreach_sqrt(squares)
        torch._foreach_div_(spread, math.sqrt(1 - beta2**folds))
        torch._foreach_add_(spread, group["eps"])
        torch._foreach_addcdiv_(parameters, ahead, spread, value=-lr / (1 - beta1**folds))

        if every > 1:
            sums = self._states(parameters, "gradient_sum")
            torch._foreach_add_(sums, gradients)
            if number % every == 0:
                _fold(first, second, list(torch._foreach_div(sums, float(every))), beta1, beta2)
                torch._foreach_zero_(sums)

    def _states(self, parameters: Tensors, name: str) -> Tensors:
        return [self.state[parameter][name] for parameter in parameters]


class AccumAdamW(AccumAdam):
    decoupled = True


def _fold(first: Tensors, second: Tensors, gradients: Tensors, beta1: float, beta2: float) -> None:
    """Let both moments take in the gradients."""
    torch._foreach_lerp_(first, gradients, weight=1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, gradients, gradients, value=1 - beta2)
