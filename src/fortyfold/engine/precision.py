"""What a run computes in: autocast and loss scaling, TF32, deterministic kernels, torch.compile."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from fortyfold.spec.recipe import Precision

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(spec: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """A context in which forward computes as the recipe says."""
    return nullcontext() if spec.dtype == "fp32" else torch.autocast(device.type, _DTYPES[spec.dtype])


@contextmanager
def numerics(spec: Precision) -> Iterator[None]:
    """Torch's process-wide switches as the recipe wants them; left as they were."""
    was_tf32 = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    was_deterministic = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    try:
        _set_tf32(spec.tf32, "high" if spec.tf32 else "highest")
        if spec.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with one
        _set_deterministic(spec.deterministic, benchmark=not spec.deterministic)
        yield
    finally:
        _set_tf32(*was_tf32)
        _set_deterministic(*was_deterministic)


def _set_tf32(convolutions: bool, products: str) -> None:
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.set_float32_matmul_precision(products)


def _set_deterministic(only: bool, benchmark: bool) -> None:
    torch.use_deterministic_algorithms(only)
    torch.backends.cudnn.benchmark = benchmark  # tries convolutions out and takes the fastest, not always the same one


class Scaler:
    """Scales the loss of fp16 training, so that small gradients do not vanish; a step that overflows is left out."""

    def __init__(self, spec: Precision, device: torch.device) -> None:
        self._fixed = None if spec.loss_scale == "dynamic" else float(spec.loss_scale)
        self._scaler = torch.amp.GradScaler(device.type, init_scale=self._fixed or 2.0**16)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Before gradients are looked at, or clipped."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the weights unless a gradient overflowed; that much is asked of the device, so the host waits."""
        self._scaler.step(optimizer)
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
