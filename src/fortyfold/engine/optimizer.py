"""From the recipe's [optim] to an optimiser: timm's by name, or AccumAdam. The learning rate is set at every step."""

from collections.abc import Collection, Iterable
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
_LOOKAHEAD = "lookahead_"


def build_optimizer(model: torch.nn.Module, spec: Optim) -> torch.optim.Optimizer:
    name = _known_name(spec.name)
    groups = parameter_groups(model, spec)
    try:
        return _create(name, groups, spec)
    except (TypeError, ValueError, AssertionError, ImportError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"optim: {spec.name} with {spec.arguments} cannot be had: {reason}") from None


def parameter_groups(model: torch.nn.Module, spec: Optim) -> list[Group]:
    """Parameters of like weight decay, and like share of the learning rate, together."""
    spared: Collection[str] = getattr(model, "no_weight_decay", set)()
    scales = _layer_scales(model, spec.layer_decay)
    _check_patterns(model, spec.decay_by_name)
    groups: dict[tuple[float, float], Group] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay, scale = _decay(name, parameter, spec, spared), scales.get(id(parameter), 1.0)
            group = groups.setdefault((decay, scale), {"params": [], "weight_decay": decay, "lr_scale": scale})
            group["params"].append(parameter)
    return list(groups.values())


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def _known_name(given: str) -> str:
    name = given.lower()
    bare, known = name.removeprefix(_LOOKAHEAD), timm.optim.list_optimizers()
    if name in _OWN:
        return name
    if bare not in known:
        raise UserError(f"optim.name: no optimiser {given!r}{nearest(name, [*known, *_OWN])}")
    if bare in _SECOND_ORDER:
        raise UserError(f"optim.name: {bare} wants second derivatives, which are not computed here; try adamw")
    return name


def _create(name: str, groups: list[Group], spec: Optim) -> torch.optim.Optimizer:
    if name in _OWN:
        return _OWN[name](groups, lr=spec.lr, accum_iter=spec.accum_iter, **spec.arguments)
    bare = name.removeprefix(_LOOKAHEAD)
    prefix = name.removesuffix(bare)
    optimizer: torch.optim.Optimizer = timm.optim.create_optimizer_v2(
        groups, opt=prefix + _TIMM_NAMES.get(bare, bare), lr=spec.lr, momentum=spec.momentum, **spec.arguments
    )
    dropped = [key for key in ("betas", "eps") if key in spec.arguments and key not in optimizer.defaults]
    if dropped:  # timm leaves them out without a word
        raise ValueError(f"it has no {dropped[0]}")
    return optimizer


def _decay(name: str, parameter: torch.Tensor, spec: Optim, spared: Collection[str]) -> float:
    """The first pattern that fits holds; normalisation layers, biases and what the model itself names are spared."""
    for pattern, decay in spec.decay_by_name.items():
        if fnmatchcase(name, pattern):
            return decay
    norm_or_bias = parameter.ndim <= 1 and not spec.decay_norm_and_bias
    return 0.0 if norm_or_bias or any(fnmatchcase(name, pattern) for pattern in spared) else spec.weight_decay


def _layer_scales(model: torch.nn.Module, layer_decay: float | None) -> dict[int, float]:
    """Each parameter's share of the learning rate, as timm groups layers."""
    if layer_decay is None:
        return {}
    groups = timm.optim.param_groups_layer_decay(model, layer_decay=layer_decay)
    return {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}


def _check_patterns(model: torch.nn.Module, patterns: Iterable[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"optim.decay_by_name: no parameter fits {pattern!r}{nearest(pattern, names)}")
