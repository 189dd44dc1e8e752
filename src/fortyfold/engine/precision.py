"""What a run computes in: autocast and loss scaling, TF32, deterministic kernels, torch.compile."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from fortyfold.spec.errors import RunFailed
from fortyfold.spec.recipe import Precision

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_MOST_LEFT_OUT = 50  # steps in a row
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(spec: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """A context in which forward computes as the recipe says."""
    return nullcontext() if spec.dtype == "fp32" else torch.autocast(device.type, _DTYPES[spec.dtype])


@contextmanager
def numerics(spec: Precision) -> Iterator[None]:
    """Torch's process-wide switches as the recipe wants them; left as they were."""
    was_tf32 = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    was_deterministic = (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    workspace = os.environ.get(_WORKSPACE)
    try:
        _set_tf32(spec.tf32, "high" if spec.tf32 else "highest")
        if spec.deterministic:
            os.environ.setdefault(_WORKSPACE, ":4096:8")  # cuBLAS is deterministic only with one
        _set_deterministic(spec.deterministic, benchmark=not spec.deterministic)
        yield
    finally:
        _set_tf32(*was_tf32)
        _set_deterministic(*was_deterministic)
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)


def _set_tf32(convolutions: bool, products: str) -> None:
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.set_float32_matmul_precision(products)


def _set_deterministic(only: bool, benchmark: bool, warn_only: bool = False) -> None:
    torch.use_deterministic_algorithms(only, warn_only=warn_only)
    torch.backends.cudnn.benchmark = benchmark  # tries convolutions out and takes the fastest, not always the same one


class Scaler:
    """Scales the loss of fp16 training, so that small gradients do not vanish; a step that overflows is left out."""

    def __init__(self, spec: Precision, device: torch.device) -> None:
        self._fixed = None if spec.loss_scale == "dynamic" else float(spec.loss_scale)
        self._scaler = torch.amp.GradScaler(device.type, init_scale=self._fixed or 2.0**16)
        self._left_out = 0  # steps, since the last that was not

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Before gradients are looked at, or clipped."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the weights unless a gradient overflowed; that much is asked of the device, so the host waits."""
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        self._left_out = self._left_out + 1 if self._scaler.get_scale() < before else 0
        if self._left_out >= _MOST_LEFT_OUT:
            raise RunFailed(
                f"the gradients of {self._left_out} steps in a row overflowed in fp16, so no weight moved (loss scale "
                f'{before:g}); try a smaller precision.loss_scale, or "dynamic", or precision.dtype = "bf16"'
            )
        if self._fixed is not None:
            self._scaler.update(self._fixed)

    def state(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)


def try_compiler(device: torch.device) -> str | None:
    """Why torch.compile does not work here; None when it does."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=device))
    except Exception as error:  # whatever a missing or broken compiler brings about
        return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return None
