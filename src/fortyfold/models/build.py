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
    arguments = _arguments(spec)
    try:
        model: torch.nn.Module = timm.create_model(spec.name, num_classes=num_classes, **arguments)
    except Exception as error:  # timm passes arguments on to whatever layers they concern
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"model.arguments: {spec.name} does not take {arguments}: {reason}") from None
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
    named = {key: getattr(spec, key) for key in ("zero_init_last", "drop_rate", "drop_path_rate")}
    own = {key: value for key, value in named.items() if value is not None}
    aa_layer = spec.arguments.get("aa_layer")
    if aa_layer is None:
        return {**spec.arguments, **own}
    if aa_layer not in _AA_LAYERS:
        valid = ", ".join(_AA_LAYERS)
        raise UserError(
            f"model.arguments: no aa_layer {aa_layer!r}; there are: {valid}{nearest(str(aa_layer), _AA_LAYERS)}"
        )
    return {**spec.arguments, "aa_layer": _AA_LAYERS[aa_layer], **own}


def check_fits(model: torch.nn.Module, num_classes: int, sizes: Iterable[int], rectangular: bool = False) -> None:
    """Refuse a network whose answer is not a number a class, and image sizes that it cannot take, before hours are
    spent; leaves no trace in it."""
    first = next(model.parameters(), None)
    if first is None:
        raise UserError(f"the model {name_model(model)} has no parameters; there is nothing to train")
    generators = [first.device] if first.device.type == "cuda" else []
    was_training = model.training
    model.eval()
    try:
        for px in sorted(sizes):
            with torch.random.fork_rng(devices=generators), torch.inference_mode():
                for width in (px, px + 8) if rectangular else (px,):
                    _try_size(model, num_classes, torch.zeros(1, 3, px, width, device=first.device))
    finally:
        model.train(was_training)


def _try_size(model: torch.nn.Module, num_classes: int, image: torch.Tensor) -> None:
    height, width = image.shape[2:]
    try:
        answer = model(image)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an own network may raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        what = f"{height} px" if width == height else f"{width} × {height} px (evaluate.rectangular)"
        raise UserError(f"the model cannot take images of {what}: {reason}") from None
    shape = tuple(answer.shape) if isinstance(answer, torch.Tensor) else type(answer).__name__
    if shape != (1, num_classes):
        raise UserError(
            f"the model must give a number for each of {num_classes} classes, but for an image it gives {shape}"
        )
