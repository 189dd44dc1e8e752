"""`recipes show --plot` and `--png`: the numbers, the text (compared with tests/golden/) and the image."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fortyfold.cli import course_png
from fortyfold.cli.course import IMAGENET_IMAGES, Series, default_images, lay_course, tick_epochs
from fortyfold.cli.course_text import draw_text
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.recipe_file import load_recipe

Fortyfold = Callable[..., tuple[int, str, str]]

GOLDEN = Path(__file__).parent.parent / "golden"
PHASES = [
    {"epochs": 12, "px": 128},
    {"epochs": 8, "px": 192, "global_batch": 48, "lr": [0.1, 0.02]},
    {"epochs": 6, "px": 288, "global_batch": 32},
]


def recipe(**changes: Any) -> Recipe:
    raw = {
        "name": "mine", "global_batch": 64, "model": {"name": "m"}, "data": {"root": "x"}, "optim": {"lr": 0.1},
        "schedule": {"warmup_epochs": 2.0}, "phases": PHASES,
    }  # fmt: skip
    return Recipe.model_validate({**raw, **changes})


def test_a_course_has_every_phases_first_and_last_step() -> None:
    course = lay_course(recipe(), 480)
    assert course.title == "mine: 26 epochs of 480 images, 266 steps"
    assert course.borders == (12, 20) and len(course.epochs) == 266
    learning_rate, px, batch = (series.values for series in course.series)
    last, first = course.epochs.index(12) - 1, course.epochs.index(12)
    assert (px[last], px[first], batch[last], batch[first]) == (128, 192, 64, 48)
    assert learning_rate[first] == 0.1 and 0.06 < learning_rate[last] < 0.07


def test_a_long_run_is_drawn_from_some_of_its_steps() -> None:
    course = lay_course(recipe(), IMAGENET_IMAGES)
    assert 2000 < len(course.epochs) < 2100
    assert {0, 12, 20} < set(course.epochs)
    assert max(course.epochs) == pytest.approx(26, abs=1e-4)
    assert course.series[0].in_words() == "learning rate: 0.001 to 0.1 to 2.67e-13"
    assert course.series[2].in_words() == "global batch: 64 to 48 to 32"


def test_a_series_in_words() -> None:
    assert Series("x", (1.0, 1.0, 2.5, 1.0)).in_words() == "x: 1 to 2.5 to 1"
    assert Series("x", (0.0, *range(20), 0.0)).in_words() == "x: 0 to 19 to 0"
    assert Series("x", tuple(range(5000, 0, -1))).in_words() == "x: 5,000 to 1"


def test_a_rank_batch_is_drawn_for_one_rank_and_says_so() -> None:
    course = lay_course(recipe(global_batch=None, rank_batch=16), 480)
    assert course.series[2].in_words() == "global batch on one rank (rank_batch): 16 to 48 to 32"


def test_images_are_the_demos_or_imagenets() -> None:
    assert default_images(load_recipe("tiny")) == 250
    assert default_images(load_recipe("tiny", {"data.demo": None})) == 1_281_167


@pytest.mark.parametrize("num_epochs", [1, 2, 3, 7, 16, 26, 90, 300, 999])
def test_ticks_are_round_and_few(num_epochs: int) -> None:
    ticks = tick_epochs(num_epochs, 8)
    assert ticks[0] == 0 and ticks[-1] == num_epochs
    assert 2 <= len(ticks) <= 9 and ticks == sorted(set(ticks))


@pytest.mark.parametrize(
    ("name", "changes", "images", "width"),
    [
        ("phases", {}, 480, 80),
        ("one_cycle", {"schedule": {"name": "one_cycle"}, "phases": [], "epochs": 90}, IMAGENET_IMAGES, 60),
        ("one_step", {"schedule": {}, "phases": [{"epochs": 1, "lr": 0.0}]}, 1, 40),
    ],
)
def test_the_text_is_the_golden_one(name: str, changes: dict[str, Any], images: int, width: int) -> None:
    text = draw_text(lay_course(recipe(**changes), images), width)
    assert max(map(len, text.splitlines())) <= width
    assert text == (GOLDEN / f"plot_{name}.txt").read_text(encoding="utf-8")


def test_the_image_has_three_panels_with_lines_axes_and_borders() -> None:
    course = lay_course(recipe(optim={"lr": 0.1}, schedule={"name": "constant"}), 480)
    image = Image.open(io.BytesIO(course_png.draw_png(course)))
    assert (image.format, image.size, image.mode) == ("PNG", (course_png.WIDTH, course_png.HEIGHT), "RGB")

    def pixel(x: float, y: float) -> Any:
        return image.getpixel((int(x), int(y)))

    panels = course_png.lay_panels(course)
    assert len(panels) == 3
    for panel, value in zip(panels, (0.1, 128, 64), strict=True):
        assert pixel(panel.x(6), panel.y(value)) == course_png.LINE
        assert pixel(panel.x(6), panel.y(value / 4)) == course_png.PAPER
        assert pixel(panel.x(12), panel.bottom - 9) != course_png.PAPER != pixel(panel.x(20), panel.bottom - 9)
        assert max(pixel(course_png.LEFT, panel.bottom - 9)) < 200  # the axis
    assert pixel(panels[1].x(23), panels[1].y(288)) == course_png.LINE
    assert pixel(panels[2].x(23), panels[2].y(32)) == course_png.LINE
    for x, y in ((2, 2), (1197, 2), (2, 887), (1197, 887)):
        assert pixel(x, y) == course_png.PAPER


def test_the_command_draws_in_80_columns_and_writes_an_image(
    tmp_path: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", None)  # no terminal to ask
    code, out, _ = fortyfold("recipes", "show", "tiny", "--plot", "--png", tmp_path / "x.png")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "tiny: 3 epochs of 250 images, 24 steps" and lines[-1] == f"wrote {tmp_path / 'x.png'}"
    assert max(map(len, lines[:-1])) == 80 and "\x1b" not in out
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]
    with Image.open(tmp_path / "x.png") as image:
        assert image.format == "PNG"
    out = fortyfold("recipes", "show", "tiny", "--plot", "--images", 64, "--set", "epochs=2")[1]
    assert out.startswith("tiny: 2 epochs of 64 images, 4 steps\n")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--plot --explain", "--explain is about the TOML"),
        ("--png nowhere/x.png", "nowhere/x.png: No such file or directory"),
        ("--png .", "is a directory"),
        ("--plot --images 0", "Invalid value for '--images'"),
        ("--plot --set schedule.name=cosin", "no schedule 'cosin'"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fortyfold: Fortyfold, options: str, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = fortyfold("recipes", "show", "tiny", *options.split())
    assert code == 2 and line in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
