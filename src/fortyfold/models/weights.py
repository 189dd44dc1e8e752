"""From a .pth file of torch.save to a .safetensors file, by torch's weights_only loader: no code of the file is run.

The usual wrappings are known (`state_dict`, `model`, with `ema` `state_dict_ema`, `model_ema`), and the prefixes that
DistributedDataParallel, torch.compile and averaging put before each name are taken off.
"""

import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from fortyfold.spec.errors import UserError
from fortyfold.spec.plugin import nearest
from fortyfold.spec.run_dir import write_atomically

SUFFIX = ".safetensors"
KEYS, EMA_KEYS = ("state_dict", "model"), ("state_dict_ema", "model_ema")
PREFIXES = ("module.", "_orig_mod.")
_COUNTER = "n_averaged"  # torch's AveragedModel has it beside its weights


@dataclass(frozen=True)
class Converted:
    key: str | None  # of the file, under which the weights were
    num_tensors: int
    num_bytes: int


def convert(source: Path, target: Path, *, ema: bool = False, key: str | None = None) -> Converted:
    """Write the weights in `source` to `target`, which appears whole or not at all."""
    if target.suffix != SUFFIX:
        raise UserError(f"{target}: the name of what is written must end in {SUFFIX}")
    if ema and key is not None:
        raise UserError("--ema and --key exclude each other; --key names any entry, the EMA's too")
    found, weights = _pick(_load(source), source, (key,) if key is not None else EMA_KEYS if ema else ())
    tensors = strip_prefixes(weights)
    try:
        # Copied, since safetensors takes no tensors that share memory, and tied weights do.
        data = safetensors.torch.save(
            {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        )
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{source}: safetensors cannot hold its tensors: {_first_sentence(error)}") from None
    write_atomically(target, data)
    return Converted(found, len(tensors), len(data))


def strip_prefixes(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Take off the prefixes that all names have; AveragedModel's counter does not count, and goes with them."""
    stripped = dict(weights)
    while prefix := next((prefix for prefix in PREFIXES if _all_have(stripped, prefix)), None):
        stripped = {name.removeprefix(prefix): tensor for name, tensor in stripped.items() if name != _COUNTER}
    return stripped


def _all_have(weights: Mapping[str, torch.Tensor], prefix: str) -> bool:
    names = weights.keys() - {_COUNTER}
    return bool(names) and all(name.startswith(prefix) for name in names)


def _load(source: Path) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):  # about formats; what cannot be read is an error
            return torch.load(source, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise UserError(_why_not(source, error)) from None


def _why_not(source: Path, error: Exception) -> str:
    refused = re.search(r"GLOBAL (\S+) was not an allowed global", str(error))
    if refused and isinstance(error, pickle.UnpicklingError):
        return (
            f"{source} holds more than tensors ({refused[1]}), and loading that could run code; "
            "whoever trusts the file saves its weights alone: torch.save(model.state_dict(), FILE)"
        )
    reason = f": {_first_sentence(error)}" if isinstance(error, RuntimeError) else ""
    return f"{source} was not written by torch.save, or is damaged{reason}"


def _first_sentence(error: Exception) -> str:
    return re.split(r"\.\s|\n", str(error))[0]


def _pick(loaded: Any, source: Path, wanted: tuple[str, ...]) -> tuple[str | None, Mapping[str, torch.Tensor]]:
    """The state dict in what was loaded, and its key there; without `wanted` keys, the usual ones or none."""
    if not isinstance(loaded, Mapping):
        raise UserError(f"{source} is no state dict but of type {type(loaded).__name__}")
    found = next((key for key in wanted or KEYS if isinstance(loaded.get(key), Mapping)), None)
    if found is None and wanted:
        raise UserError(f"{source} has no weights under {' or '.join(wanted)}; {_entries(loaded, wanted[0])}")
    weights = loaded[found] if found else loaded
    odd = [name for name, value in weights.items() if not _is_named_tensor(name, value)]
    if odd or not weights:
        what = f"{odd[0]!r} ({type(weights[odd[0]]).__name__}) is no named tensor" if odd else "it is empty"
        place = f"{found} of {source}" if found else source
        raise UserError(f"{place} is no state dict: {what}; {_entries(loaded)}")
    return found, weights


def _is_named_tensor(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, torch.Tensor)


def _entries(loaded: Mapping[Any, Any], wanted: str = "") -> str:
    """What --key could name."""
    keys = [str(key) for key, value in loaded.items() if isinstance(value, Mapping)]
    return f"--key can name: {', '.join(keys)}{nearest(wanted, keys)}" if keys else "no entry of it is one"
