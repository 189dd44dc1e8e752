"""Local SGD: ranks step alone, and average their weights after every so many steps. With an outer optimiser the
average is not taken as it is: its distance from the last common weights is a gradient, by which these are moved with
Nesterov's momentum (DiLoCo)."""

from typing import Any

import torch

from fortyfold.parallel.ranks import Ranks, group_ranks


class LocalSGD:
    """Wraps a network and its optimiser: call `step()` instead of the optimiser's. All start with rank 0's weights.

    In the first `together_steps` they average after every step: where weights move fast, ranks alone go astray.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        sync_every: int = 8,
        *,
        together_steps: int = 0,
        outer: str = "average",
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        ranks: Ranks | None = None,
    ) -> None:
        self._optimizer, self._every, self._together = optimizer, sync_every, together_steps
        self._ranks = ranks or group_ranks()
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._ranks.copy_first([*model.parameters(), *model.buffers()])
        self._lr, self._momentum = outer_lr, outer_momentum
        keeps = outer == "nesterov"
        self._common = [parameter.detach().clone() for parameter in self._parameters] if keeps else []
        self._velocity = [torch.zeros_like(tensor) for tensor in self._common]
        self._steps_done = 0

    def step(self) -> None:
        """The optimiser's step, and after every `sync_every` of them the ranks' agreement."""
        self._optimizer.step()
        self.count_step()

    @torch.no_grad()
    def count_step(self) -> None:
        """The optimiser has stepped."""
        self._steps_done += 1
        if (self._steps_done - self._together) % (1 if self._steps_done <= self._together else self._every):
            return
        self._ranks.mean(parameter.detach() for parameter in self._parameters)
        if self._common:
            self._move_common()

    def _move_common(self) -> None:
        for parameter, common, velocity in zip(self._parameters, self._common, self._velocity, strict=True):
            gradient = common - parameter
            velocity.mul_(self._momentum).add_(gradient)
            common.sub_(gradient.add_(velocity, alpha=self._momentum), alpha=self._lr)
            parameter.copy_(common)

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank."""
        return {"steps_done": self._steps_done, "common": list(self._common), "velocity": list(self._velocity)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the weights were put back; without common weights in it, these are taken for them."""
        self._steps_done = state["steps_done"]
        common = state.get("common", self._parameters if self._common else [])
        velocity = state.get("velocity", [torch.zeros_like(tensor) for tensor in self._velocity])
        for tensor, value in zip([*self._common, *self._velocity], [*common, *velocity], strict=True):
            tensor.copy_(value)
