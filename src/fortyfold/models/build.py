"""From the recipe's [model] to a network."""

import torch

from fortyfold.models.timm_import import timm
from fortyfold.spec.errors import UserError
from fortyfold.spec.plugin import nearest
from fortyfold.spec.recipe import Model


def build_model(spec: Model, num_classes: int) -> torch.nn.Module:
    """The network with fresh weights, drawn from torch's global generator."""
    if not timm.is_model(spec.name):
        raise UserError(
            f"model.name: timm {timm.__version__} has no {spec.name!r}{nearest(spec.name, timm.list_models())}"
        )
    try:
        model: torch.nn.Module = timm.create_model(spec.name, num_classes=num_classes, **spec.arguments)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"model.arguments: {spec.name} does not take {spec.arguments}: {reason}") from None
    if spec.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model
