"""First weights from a .safetensors file (model.pretrained), by the model's own names.

All must fit but the classifier: one for other classes is left as it is. The file is read, not mapped: a mapped file
that shrinks kills the process.
"""

import shlex
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from fortyfold.spec.errors import UserError

PICKLED = (".pth", ".pt", ".bin", ".ckpt", ".tar")
_NAMED = 3  # tensors of each kind in an error
Tensors = dict[str, torch.Tensor]


def load_pretrained(model: torch.nn.Module, path: str | Path) -> list[str]:
    """Fill `model` with the file's weights, in the model's dtypes; gives a sentence on each classifier left fresh."""
    source = Path(path)
    given, own = _read(source), model.state_dict()
    notes = []
    for head in _classifiers(model):
        inside = [name for name in {**own, **given} if name.startswith(f"{head}.")]
        differing = [_difference(name, given, own) for name in inside if _differs(name, given, own)]
        if differing:
            notes.append(
                f"the classifier {head} starts fresh, since the one in {source} has another shape: {differing[0]}"
            )
            given, own = _without(given, inside), _without(own, inside)
    _check(source, given, own)
    model.load_state_dict(given, strict=False)
    return notes


def _read(path: Path) -> Tensors:
    if path.suffix in PICKLED:
        target = shlex.quote(str(path.with_suffix(".safetensors")))
        raise UserError(
            f"model.pretrained: {path} is a pickle, which is never loaded; "
            f"convert it first: fortyfold weights convert {shlex.quote(str(path))} {target}"
        )
    try:
        return safetensors.torch.load(path.read_bytes())
    except OSError as error:
        raise UserError(f"model.pretrained: cannot read {path}: {error.strerror}") from None
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise UserError(f"model.pretrained: {path} is no whole safetensors file: {error}") from None


def _classifiers(model: torch.nn.Module) -> list[str]:
    """The names of the modules that timm calls the classifier: one, or several. Other networks may have none."""
    get_classifier = getattr(model, "get_classifier", None)
    found = get_classifier() if callable(get_classifier) else ()
    heads = found if isinstance(found, list | tuple) else (found,)
    return [name for name, module in model.named_modules() if any(module is head for head in heads)]


def _check(path: Path, given: Tensors, own: Tensors) -> None:
    """Refuse what does not fit, naming the first few."""
    wrong = {
        "missing": [name for name in own if name not in given and not name.endswith("num_batches_tracked")],
        "unexpected": sorted(name for name in given if name not in own),  # safetensors keeps no order
        "of another shape": [_difference(name, given, own) for name in own if _differs(name, given, own)],
    }
    if any(wrong.values()):
        kinds = "; ".join(f"{kind}: {_some(names)}" for kind, names in wrong.items() if names)
        raise UserError(f"model.pretrained: {path} does not fit the model; {kinds}")


def _differs(name: str, given: Tensors, own: Tensors) -> bool:
    return name in given and name in own and given[name].shape != own[name].shape


def _difference(name: str, given: Tensors, own: Tensors) -> str:
    there, here = ("×".join(map(str, tensors[name].shape)) or "scalar" for tensors in (given, own))
    return f"{name} ({there}, here {here})"


def _without(tensors: Tensors, names: list[str]) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
