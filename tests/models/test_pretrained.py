"""model.pretrained: names must match, a classifier for other classes is left fresh, all else is refused."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from fortyfold.models.build import build_model
from fortyfold.models.pretrained import load_pretrained
from fortyfold.spec.errors import UserError
from fortyfold.spec.recipe import Model

Tensors = dict[str, torch.Tensor]


def network(num_classes: int = 4, name: str = "test_resnet") -> torch.nn.Module:
    return build_model(Model(name=name), num_classes)


def saved(path: Path, tensors: Tensors) -> Path:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    path.write_bytes(safetensors.torch.save(contiguous))
    return path


def test_the_same_model_gets_every_tensor(tmp_path: Path) -> None:
    source, model = network(), network()
    path = saved(tmp_path / "a.safetensors", source.state_dict())
    assert load_pretrained(model, str(path)) == []
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    weight = next(parameter for parameter in model.parameters() if parameter.ndim == 4 and parameter.shape[1] > 1)
    assert weight.is_contiguous(memory_format=torch.channels_last)  # as build_model laid it out


def test_other_dtypes_become_the_models_and_counters_may_be_missing(tmp_path: Path) -> None:
    source, model = network(), network()
    half = {
        name: tensor.half() for name, tensor in source.state_dict().items() if not name.endswith("num_batches_tracked")
    }
    assert len(half) < len(source.state_dict())
    assert load_pretrained(model, saved(tmp_path / "a.safetensors", half)) == []
    for name, tensor in half.items():
        assert model.state_dict()[name].dtype == torch.float32
        assert torch.equal(model.state_dict()[name], tensor.float())


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("test_resnet", ["fc"]),
        ("test_vit", ["head"]),
        ("test_convnext", ["head.fc"]),
        ("deit_tiny_distilled_patch16_224", ["head", "head_dist"]),
    ],
)
def test_a_classifier_for_other_classes_starts_fresh(tmp_path: Path, name: str, heads: list[str]) -> None:
    source, model = network(9, name), network(4, name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    path = saved(tmp_path / "a.safetensors", source.state_dict())
    notes = load_pretrained(model, path)
    assert [note.split(" (")[0] for note in notes] == [
        f"the classifier {head} starts fresh, since the one in {path} has another shape: {head}.weight"
        for head in heads
    ]
    assert all("(9×" in note and "here 4×" in note for note in notes)
    for key, tensor in model.state_dict().items():
        in_head = any(key.startswith(f"{head}.") for head in heads)
        assert torch.equal(tensor, before[key] if in_head else source.state_dict()[key]), key


def test_a_network_that_is_not_timms_has_no_classifier(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.safetensors", torch.nn.Linear(3, 9).state_dict())
    assert load_pretrained(torch.nn.Linear(3, 9), path) == []
    with pytest.raises(UserError, match=r"of another shape: weight \(9×3, here 4×3\), bias \(9, here 4\)$"):
        load_pretrained(torch.nn.Linear(3, 4), path)


def without(tensors: Tensors, *prefixes: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}


@pytest.mark.parametrize(
    ("removed", "added", "line"),
    [
        (("layer1.0.conv1.",), {}, r"missing: layer1\.0\.conv1\.weight$"),
        (("fc.",), {}, r"missing: fc\.weight, fc\.bias$"),
        ((), {"extra.weight": torch.zeros(2)}, r"unexpected: extra\.weight$"),
        ((), {"layer1.0.conv1.weight": torch.zeros(2)}, r"of another shape: layer1\S+ \(2, here [\d×]+\)$"),
        (("layer1.",), {"x": torch.zeros(1)}, r"missing: layer1\S+, layer1\S+, layer1\S+ and \d+ more; unexpected: x$"),
    ],
)  # fmt: skip
def test_any_other_misfit_is_refused_and_changes_nothing(
    tmp_path: Path, removed: tuple[str, ...], added: Tensors, line: str
) -> None:
    path = saved(tmp_path / "a.safetensors", {**without(network().state_dict(), *removed), **added})
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=rf"^model\.pretrained: \S+ does not fit the model; {line}"):
        load_pretrained(model, path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("suffix", ["pth", "pt", "bin", "pth.tar"])
def test_a_pickle_is_refused_with_the_command_that_converts_it(suffix: str) -> None:
    with pytest.raises(UserError) as raised:
        load_pretrained(torch.nn.Linear(1, 1), f"my weights.{suffix}")
    stem = f"my weights.{suffix}".rpartition(".")[0]
    assert str(raised.value).endswith(f"fortyfold weights convert 'my weights.{suffix}' '{stem}.safetensors'")


def test_a_torn_or_missing_file_is_one_line(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.safetensors", network().state_dict())
    whole = path.read_bytes()
    for data in (whole[: len(whole) // 2], whole[:5], b"", b"hello" * 100):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"^model\.pretrained: \S+ is no whole safetensors file: "):
            load_pretrained(network(), path)
    for place in (tmp_path, tmp_path / "nowhere.safetensors"):
        with pytest.raises(UserError, match=r"^model\.pretrained: cannot read \S+: (Is a directory|No such file)"):
            load_pretrained(network(), place)
