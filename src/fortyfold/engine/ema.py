"""A moving average of the weights, kept beside them: what is averaged, and by how much, is as in timm's ModelEmaV3."""

from copy import deepcopy

import torch

from fortyfold.spec import recipe


class Ema:
    """Holds the averaged network in `module`, always in evaluation mode."""

    def __init__(self, model: torch.nn.Module, spec: recipe.Ema) -> None:
        self._spec = spec
        self.module = deepcopy(model).eval().requires_grad_(False)
        # Found once and not at every step: the parameters themselves, whose memory may be replaced by other. Tied
        # weights stand there under several names.
        named = zip(self.module.state_dict().values(), model.state_dict(keep_vars=True).values(), strict=True)
        pairs = list({average.data_ptr(): (average, value) for average, value in named if average.numel()}.values())
        self._averaged = [pair for pair in pairs if pair[0].is_floating_point()]
        self._copied = [pair for pair in pairs if not pair[0].is_floating_point()]

    def decay(self, step: int) -> float:
        """How much of the average stays after the step numbered `step` from 1; the first is taken as it is."""
        if step <= 1:
            return 0.0
        if not self._spec.warmup:
            return self._spec.decay
        rising = 1 - (1 + (step - 1) / self._spec.warmup_gamma) ** -self._spec.warmup_power
        return min(float(rising), self._spec.decay)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights as they are after `step` steps."""
        averages, now = zip(*self._averaged, strict=True)
        torch._foreach_lerp_(averages, now, weight=1 - self.decay(step))
        if self._copied:
            counters, values = zip(*self._copied, strict=True)
            torch._foreach_copy_(counters, values)
