"""Nested state (an optimiser's, say) as plain JSON data and tensors apart, and back, bit for bit.

A tensor becomes {"$tensor": its key}, with its memory order where that is not the usual one: vectorised kernels
may round otherwise in another order. Dictionaries have text as keys.
"""

from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def flatten(value: Any, key: str) -> tuple[Any, Tensors]:
    """Plain data in which tensors are named by `key` and their path below it, and those tensors."""
    if isinstance(value, torch.Tensor):
        return _describe(value, key), {key: value}
    if isinstance(value, dict):
        assert all(isinstance(name, str) for name in value), value.keys()
        plain, tensors = _flatten_all(value.values(), [f"{key}/{name}" for name in value])
        return dict(zip(value, plain, strict=True)), tensors
    if isinstance(value, list | tuple):
        plain, tensors = _flatten_all(value, [f"{key}/{number}" for number in range(len(value))])
        return (plain if isinstance(value, list) else {"$tuple": plain}), tensors
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}, {}
    if value is None or isinstance(value, bool | int | float | str):
        return value, {}
    raise TypeError(f"{key} is a {type(value).__name__}, which no checkpoint can hold")


def unflatten(plain: Any, tensors: Tensors) -> Any:
    """What `flatten` was given."""
    if isinstance(plain, list):
        return [unflatten(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if "$tensor" in plain:
        return _laid_out(tensors[plain["$tensor"]], plain.get("order"))
    if "$tuple" in plain:
        return tuple(unflatten(item, tensors) for item in plain["$tuple"])
    if "$dtype" in plain:
        return getattr(torch, plain["$dtype"])
    return {name: unflatten(item, tensors) for name, item in plain.items()}


def _flatten_all(values: Any, keys: list[str]) -> tuple[list[Any], Tensors]:
    pairs = [flatten(value, key) for value, key in zip(values, keys, strict=True)]
    return [plain for plain, _ in pairs], {key: tensor for _, found in pairs for key, tensor in found.items()}


def _describe(tensor: torch.Tensor, key: str) -> dict[str, Any]:
    order = list(tensor.dim_order())
    return {"$tensor": key} if order == sorted(order) else {"$tensor": key, "order": order}


def _laid_out(tensor: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    if order is None:
        return tensor
    return torch.empty_permuted(tuple(tensor.shape), tuple(order), dtype=tensor.dtype).copy_(tensor)
