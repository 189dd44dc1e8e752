"""From the recipe's [model] to a network."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch

from fortyfold.models.timm_import import timm
from fortyfold.spec.errors import UserError
from fortyfold.spec.plugin import nearest
from fortyfold.spec.recipe import Model

_AA_LAYERS = {"avg": torch.nn.AvgPool2d, "blur": timm.layers.BlurPool2d}  # timm's ResNets take classes, TOML has none


def build_model(spec: Model, num_classes: int) -> torch.nn.Module:
    """The network with fresh weights, drawn from torch's global generator."""
    if not timm.is_model(spec.name):
        raise UserError(
            f"model.name: timm {timm.__version__} has no {spec.name!r}{nearest(spec.name, timm.list_models())}"
        )
    try:
        model: torch.nn.Module = timm.create_model(spec.name, num_classes=num_classes, **_arguments(spec))
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"model.arguments: {spec.name} does not take {_arguments(spec)}: {reason}") from None
    return prepare_model(model, spec)


def prepare_model(model: torch.nn.Module, spec: Model) -> torch.nn.Module:
    """The same network, in the memory order that the recipe wants."""
    if spec.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def name_model(model: torch.nn.Module) -> str:
    """Tells own networks apart: their class, and a digest of their parameters' names and shapes."""
    shapes = [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:8]
    return f"{type(model).__module__}.{type(model).__qualname__} {digest}"


def _arguments(spec: Model) -> dict[str, Any]:
    """What timm gets: only what was asked for, since not every model takes every argument."""
    rates = {"drop_rate": spec.drop_rate, "drop_path_rate": spec.drop_path_rate}
    own = {key: rate for key, rate in rates.items() if rate} | (
        {} if spec.zero_init_last is None else {"zero_init_last": spec.zero_init_last}
    )
    aa_layer = spec.arguments.get("aa_layer")
    classes = {"aa_layer": _AA_LAYERS[aa_layer]} if aa_layer in _AA_LAYERS else {}
    return {**spec.arguments, **classes, **own}


def check_fits(model: torch.nn.Module, sizes: Iterable[int], rectangular: bool = False) -> None:
    """Refuse image sizes that the network cannot take, before hours are spent; leaves no trace in it."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        for px in sorted(sizes):
            with torch.random.fork_rng(), torch.inference_mode():
                _try_size(model, px, px, device)
                if rectangular:
                    _try_size(model, px, px + 8, device)
    finally:
        model.train(was_training)


def _try_size(model: torch.nn.Module, height: int, width: int, device: torch.device) -> None:
    try:
        model(torch.zeros(1, 3, height, width, device=device))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        what = f"{height} px" if width == height else f"{width} × {height} px (evaluate.rectangular)"
        raise UserError(f"the model cannot take images of {what}: {reason}") from None
