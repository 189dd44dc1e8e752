"""From the recipe's [optim] to an optimiser. The learning rate is set anew at every step."""

import torch

from fortyfold.models.timm_import import timm
from fortyfold.spec.recipe import Optim

# timm calls Nesterov's momentum "sgd" and plain momentum "momentum".
_TIMM_NAMES = {"sgd": "momentum", "nesterov": "nesterov", "adam": "adam", "adamw": "adamw"}


def build_optimizer(model: torch.nn.Module, spec: Optim) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = timm.optim.create_optimizer_v2(
        model,
        opt=_TIMM_NAMES.get(spec.name, spec.name),
        lr=spec.lr,
        momentum=spec.momentum,
        weight_decay=spec.weight_decay,
        filter_bias_and_bn=not spec.decay_norm_and_bias,
    )
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
