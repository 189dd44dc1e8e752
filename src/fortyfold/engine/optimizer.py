"""From the recipe's [optim] to an optimiser: timm's by name, or AccumAdam. The learning rate is set at every step."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch

from fortyfold.engine.accum_adam import AccumAdam, AccumAdamW
from fortyfold.models.timm_import import timm
from fortyfold.spec.errors import UserError
from fortyfold.spec.plugin import nearest
from fortyfold.spec.recipe import Optim

Group = dict[str, Any]

_OWN = {"accumadam": AccumAdam, "accumadamw": AccumAdamW}
_TIMM_NAMES = {"sgd": "momentum"}  # timm's "sgd" is Nesterov's
_SECOND_ORDER = ("adahessian",)


def build_optimizer(model: torch.nn.Module, spec: Optim) -> torch.optim.Optimizer:
    create = _creator(spec)
    groups = parameter_groups(model, spec)
    try:
        return create(groups)
    except (TypeError, ValueError, AssertionError, ImportError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"optim: {spec.name} with {spec.arguments} cannot be had: {reason}") from None


def parameter_groups(model: torch.nn.Module, spec: Optim) -> list[Group]:
    """Parameters of like weight decay (and like share of the learning rate) together."""
    options: dict[str, Any] = {
        "weight_decay": spec.weight_decay,
        "weight_decay_exclude_1d": not spec.decay_norm_and_bias,
        "no_weight_decay_list": getattr(model, "no_weight_decay", set)(),
    }
    if spec.layer_decay is None:
        groups = timm.optim.param_groups_weight_decay(model, **options)
    else:
        groups = timm.optim.param_groups_layer_decay(model, **options, layer_decay=spec.layer_decay)
    return _with_decay_by_name(model, list(groups), spec.decay_by_name)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def _creator(spec: Optim) -> Callable[[list[Group]], torch.optim.Optimizer]:
    name = spec.name.lower()
    if name in _OWN:
        return lambda groups: _OWN[name](groups, lr=spec.lr, **{"accum_iter": spec.accum_iter} | spec.arguments)
    known = [*timm.optim.list_optimizers(), *_OWN]
    if name.removeprefix("lookahead_") not in known:
        raise UserError(f"optim.name: no optimiser {spec.name!r}{nearest(name, known)}")
    if name in _SECOND_ORDER:
        raise UserError(f"optim.name: {name} wants second derivatives, which are not computed here; try adamw")
    return lambda groups: timm.optim.create_optimizer_v2(
        groups, opt=_TIMM_NAMES.get(name, name), lr=spec.lr, momentum=spec.momentum, **spec.arguments
    )


def _with_decay_by_name(model: torch.nn.Module, groups: list[Group], decays: dict[str, float]) -> list[Group]:
    """Move the parameters that fit a pattern to groups of their own."""
    if not decays:
        return groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for pattern in decays:
        if not any(fnmatchcase(name, pattern) for name in names.values()):
            raise UserError(f"optim.decay_by_name: no parameter fits {pattern!r}{nearest(pattern, names.values())}")
    regrouped: dict[tuple[int, str | None], Group] = {}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            fit = next((pattern for pattern in decays if fnmatchcase(names[id(parameter)], pattern)), None)
            changed = {} if fit is None else {"weight_decay": decays[fit]}
            place = regrouped.setdefault((number, fit), {**group, **changed, "params": []})
            place["params"].append(parameter)
    return list(regrouped.values())
