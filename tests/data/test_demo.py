import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fortyfold.data.demo import MAX_CLASSES, DemoSpec, class_name, make_demo, render
from fortyfold.spec.errors import UserError


def digest(root: Path) -> str:
    content = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        content.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return content.hexdigest()


def test_the_same_arguments_give_the_same_bytes_whoever_makes_them(tmp_path: Path) -> None:
    spec = DemoSpec(classes=3, images=600, width=24, height=20, seed=7)
    done: list[int] = []
    assert make_demo(tmp_path / "one", spec, num_workers=1, progress=lambda count, total: done.append(count))
    assert make_demo(tmp_path / "two", spec, num_workers=2)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    assert done[-1] == 600
    other = DemoSpec(classes=3, images=600, width=24, height=20, seed=8)
    assert make_demo(tmp_path / "three", other, num_workers=1)
    assert digest(tmp_path / "three") != digest(tmp_path / "one")
    assert not make_demo(tmp_path / "one", spec)


def test_the_layout_is_an_image_folder(tiny_data: Path) -> None:
    assert len(list((tiny_data / "train").glob("*/*.jpg"))) == 250
    assert len(list((tiny_data / "val").glob("*/*.jpg"))) == 50
    assert sorted(path.name for path in (tiny_data / "val").iterdir()) == [class_name(label) for label in range(4)]


def test_a_half_made_set_is_finished_and_foreign_files_are_left_alone(tmp_path: Path) -> None:
    spec = DemoSpec(classes=2, images=24, width=20, height=20, seed=0)
    make_demo(tmp_path / "whole", spec)
    make_demo(tmp_path / "half", spec)
    manifest = json.loads((tmp_path / "half/made.json").read_text())
    (tmp_path / "half/made.json").write_text(json.dumps({**manifest, "complete": False}))
    next((tmp_path / "half/train").glob("*/*.jpg")).unlink()
    assert make_demo(tmp_path / "half", spec)
    assert digest(tmp_path / "half") == digest(tmp_path / "whole")
    with pytest.raises(UserError, match="was made with images = 24"):
        make_demo(tmp_path / "whole", DemoSpec(2, 36, 20, 20, 0))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").touch()
    with pytest.raises(UserError, match="already has files in it"):
        make_demo(tmp_path / "mine", spec)


def test_too_few_images_or_too_many_classes_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--classes 1001: there are 2 to 1000"):
        make_demo(tmp_path / "x", DemoSpec(1001, 100_000, 20, 20, 0))
    with pytest.raises(UserError, match="--images 30: 10 classes need at least 60"):
        make_demo(tmp_path / "x", DemoSpec(10, 30, 20, 20, 0))


def test_every_class_has_a_name_of_its_own() -> None:
    names = [class_name(label) for label in range(MAX_CLASSES)]
    assert len({name[4:] for name in names}) == MAX_CLASSES == 1000
    assert names == sorted(names)


def test_large_ones_weigh_what_imagenets_do(tmp_path: Path) -> None:
    make_demo(tmp_path / "large", DemoSpec(classes=2, images=24, width=500, height=375, seed=0))
    files = list((tmp_path / "large").rglob("*.jpg"))
    with Image.open(files[0]) as image:
        assert image.size == (500, 375)
    assert 100_000 < np.mean([path.stat().st_size for path in files]) < 120_000


def test_a_linear_classifier_on_the_pixels_stays_under_60_per_cent() -> None:
    """Ridge-regularised softmax regression on 24 × 24 pixels of the demo's own images."""
    spec = DemoSpec(classes=10, images=6000, width=96, height=96, seed=0)

    def load(split: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        images = [render(spec, number % 10, split, number).resize((24, 24)) for number in range(count)]
        flat = np.stack([np.asarray(image) for image in images]).reshape(count, -1)
        return torch.from_numpy(flat).float() / 255 - 0.5, torch.arange(count) % 10

    train_x, train_y = load("train", 2000)
    val_x, val_y = load("val", 500)
    torch.manual_seed(0)
    layer = torch.nn.Linear(train_x.shape[1], 10)
    optimizer = torch.optim.Adam(layer.parameters(), lr=2e-3, weight_decay=1e-3)
    for _ in range(200):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(layer(train_x), train_y).backward()
        optimizer.step()
    accuracy = (layer(val_x).argmax(1) == val_y).float().mean().item()
    assert (layer(train_x).argmax(1) == train_y).float().mean().item() > 0.3  # it did learn something
    assert accuracy < 0.6
