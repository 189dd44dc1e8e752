"""`weights convert`: what it understands, and that nothing else gets through."""

import argparse
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fortyfold.models.weights import convert, strip_prefixes
from fortyfold.spec.errors import UserError

Fortyfold = Callable[..., tuple[int, str, str]]
Tensors = dict[str, torch.Tensor]


def weights(value: float = 1.0, prefix: str = "") -> Tensors:
    return {f"{prefix}fc.weight": torch.full((2, 3), value), f"{prefix}fc.bias": torch.full((2,), value)}


def converted(tmp_path: Path, content: object, **options: Any) -> Tensors:
    source, target = tmp_path / "in.pth", tmp_path / "out.safetensors"
    torch.save(content, source)
    made = convert(source, target, **options)
    assert made.num_bytes == target.stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pth", "out.safetensors"]
    tensors = safetensors.torch.load(target.read_bytes())
    assert made.num_tensors == len(tensors)
    return tensors


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("content", "options"),
    [
        (weights(), {}),
        ({"state_dict": weights(), "state_dict_ema": weights(2), "epoch": 3}, {}),
        ({"state_dict": weights(2), "state_dict_ema": weights()}, {"ema": True}),
        ({"model": weights(), "optimizer": {"state": {}}}, {}),
        ({"model": weights(2), "model_ema": weights()}, {"ema": True}),
        ({"teacher": weights(), "student": weights(2)}, {"key": "teacher"}),
        ({"model": weights(2), "model_ema": weights()}, {"key": "model_ema"}),
        (weights(prefix="module."), {}),
        ({"state_dict": weights(prefix="_orig_mod.")}, {}),
        (weights(prefix="module._orig_mod."), {}),
        ({"model_ema": {"n_averaged": torch.tensor(5), **weights(prefix="module.")}}, {"ema": True}),
    ],
)
def test_the_usual_wrappings_are_understood(tmp_path: Path, content: object, options: dict[str, Any]) -> None:
    assert_same(converted(tmp_path, content, **options), weights())


def test_a_prefix_that_not_all_names_have_is_a_name() -> None:
    mixed = weights(prefix="module.") | {"head": torch.zeros(1)}
    assert strip_prefixes(mixed).keys() == mixed.keys()
    assert strip_prefixes({"n_averaged": torch.tensor(5)}).keys() == {"n_averaged"}


def test_dtypes_stay_and_tied_or_transposed_tensors_are_written_out(tmp_path: Path) -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    content = {
        "a": tied, "b": tied, "turned": tied.t(), "half": tied.half(), "count": torch.tensor(3),
        "last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last), "p": torch.nn.Parameter(tied),
    }  # fmt: skip
    found = converted(tmp_path, content)
    assert_same(found, {name: tensor.detach() for name, tensor in content.items()})
    assert found["half"].dtype == torch.float16 and found["count"].dtype == torch.int64


@pytest.mark.parametrize(
    ("content", "options", "line"),
    [
        ([weights()], {}, r"in\.pth is no state dict but of type list$"),
        ({}, {}, r"in\.pth is no state dict: it is empty; no entry of it is one$"),
        ({"net": weights(), "epoch": 3}, {}, r"'net' \(dict\) is no named tensor; --key can name: net$"),
        ({"state_dict": {**weights(), "step": 3}}, {}, r"state_dict of .*in\.pth is no state dict: 'step' \(int\)"),
        ({None: torch.zeros(1)}, {}, r"is no state dict: None \(Tensor\) is no named tensor"),
        (weights(), {"ema": True}, r"no weights under state_dict_ema or model_ema; no entry of it is one$"),
        ({"teacher": weights()}, {"key": "techer"}, r"under techer; --key can name: teacher; did you mean teacher\?$"),
        (weights(), {"key": "fc.bias"}, r"no weights under fc\.bias; no entry of it is one$"),
        (weights(), {"key": "a", "ema": True}, r"--ema and --key exclude each other"),
        ({"a": torch.zeros(2, 2).to_sparse()}, {}, r"safetensors cannot hold its tensors: "),
    ],
)  # fmt: skip
def test_what_is_no_state_dict_is_refused(tmp_path: Path, content: object, options: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        converted(tmp_path, content, **options)
    assert not (tmp_path / "out.safetensors").exists()


class Evil:
    """Unpickled by plain torch.load, this would make a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


def test_no_code_of_the_file_is_run(tmp_path: Path) -> None:
    source, trace = tmp_path / "in.pth", tmp_path / "trace"
    torch.save({"state_dict": weights(), "extra": Evil(trace)}, source)
    with pytest.raises(UserError, match=r"in\.pth holds more than tensors \(\S+\), and loading that could run code"):
        convert(source, tmp_path / "out.safetensors")
    assert not trace.exists()
    torch.load(source, weights_only=False)
    assert trace.exists()  # so the file was dangerous


def test_the_class_that_was_refused_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\(argparse\.Namespace\).*torch\.save\(model\.state_dict\(\), FILE\)"):
        converted(tmp_path, {"model": weights(), "args": argparse.Namespace(lr=1)})


@pytest.mark.parametrize("damage", ["torn", "torn legacy", "empty", "text", "pickle"])
def test_a_damaged_file_is_one_line(tmp_path: Path, damage: str, fortyfold: Fortyfold) -> None:
    source = tmp_path / "in.pth"
    torch.save(weights(), source, _use_new_zipfile_serialization=damage != "torn legacy")
    whole = source.read_bytes()
    source.write_bytes(
        {"empty": b"", "text": b"hello world", "pickle": pickle.dumps([1])}.get(damage, whole[: len(whole) - 20])
    )
    code, _, err = fortyfold("weights", "convert", source, tmp_path / "out.safetensors")
    assert code == 2 and err.count("\n") == 1
    assert "in.pth was not written by torch.save, or is damaged" in err


def test_the_command_tells_what_it_wrote(tmp_path: Path, fortyfold: Fortyfold) -> None:
    source, target = tmp_path / "in.pth", tmp_path / "out.safetensors"
    torch.save({"state_dict_ema": weights(prefix="module.")}, source)
    code, out, _ = fortyfold("weights", "convert", source, target, "--ema")
    assert code == 0
    assert out == f"wrote {target}: 2 tensors, {target.stat().st_size} bytes, from state_dict_ema of {source}\n"


@pytest.mark.parametrize(
    ("source", "target", "line"),
    [
        ("nowhere.pth", "out.safetensors", "nowhere.pth: No such file"),
        ("in.pth", "out.pth", "out.pth: the name of what is written must end in .safetensors"),
        ("in.pth", "nowhere/out.safetensors", "nowhere/out.safetensors: No such file"),
        ("in.pth", "folder.safetensors", "is a directory"),
    ],
)
def test_a_wrong_place_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fortyfold: Fortyfold, source: str, target: str, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(weights(), "in.pth")
    Path("folder.safetensors").mkdir()
    code, _, err = fortyfold("weights", "convert", source, target)
    assert code == 2 and line in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.safetensors", "in.pth"]
