import re
from pathlib import Path
from typing import Any

import pytest

from fortyfold.spec.errors import UserError
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.recipe_file import built_in_names, flatten, load_recipe, parse_changes
from fortyfold.spec.toml_text import to_toml

MINIMAL = """
epochs = 2
global_batch = 8
[model]
name = "resnet18"
[data]
root = "x"
[optim]
lr = 0.1
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_without_phases_is_one_phase(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL))
    (phase,) = recipe.all_phases()
    assert recipe.name == "mine"
    assert (phase.epochs, phase.px, phase.global_batch, phase.min_scale) == (2, 224, 8, 0.08)


def test_phases_fill_from_the_recipe_and_keep_their_own(tmp_path: Path) -> None:
    text = MINIMAL.replace("epochs = 2", "px = 64") + (
        "[[phases]]\nepochs = [0, 3]\npx = 32\nlr = [0.1, 0.4]\n"
        "[[phases]]\nepochs = 2\nrank_batch = 4\nmin_scale = 0.5\n"
    )
    first, second = load_recipe(write(tmp_path, text)).all_phases()
    assert (first.px, first.global_batch, first.lr, first.min_scale) == (32, 8, (0.1, 0.4), 0.08)
    assert (second.px, second.global_batch, second.rank_batch, second.min_scale) == (64, None, 4, 0.5)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("lr = 0.1", "lrr = 0.1"), r"unknown key optim\.lrr; did you mean optim\.lr\? \(and 1 more\)"),
        (("lr = 0.1", "lr = 0.1\nmomentun = 1.0"), r"unknown key optim\.momentun; did you mean optim\.momentum\?"),
        (("epochs = 2", "epochs = 2\nlr = 1.0"), r"unknown key lr; did you mean optim\.lr\?"),
        (("epochs = 2", "epochs = 2\nzzz = 1.0"), r"unknown key zzz; valid here: name, epochs, px"),
        (("epochs = 2", 'epochs = "two"'), r"epochs: should be a valid integer, got \"two\""),
        (("epochs = 2", "epochs = 2.5"), r"epochs: should be a valid integer"),
        (("epochs = 2", "epochs = true"), r"epochs: should be a valid integer, got true"),
        (("lr = 0.1", "lr = nan"), r"optim\.lr: should be a finite number"),
        (("lr = 0.1", "lr = -1"), r"optim\.lr: should be greater than 0, got -1"),
        (("lr = 0.1", "lr = 0.1\nclip_norm = 1.0\nclip_value = 1.0"), r"optim: clip_norm and clip_value exclude"),
        (("epochs = 2", 'epochs = 2\nloss.name = "mse"'), r"loss\.name: should be 'cross_entropy' or 'bce'"),
        (("epochs = 2", "epochs = 2\nloss.bce_threshold = 0.2"), r'loss: bce_threshold is for name = "bce", and does'),
        (("epochs = 2", "epochs = 2\nprecision.loss_scale = 8.0"), r'precision: loss_scale is for dtype = "fp16"'),
        (("epochs = 2", "epochs = 2\nema.warmup = true"), r"ema: warmup is for an average \(decay > 0\)"),
        (("epochs = 2", ""), r"give epochs, or phases"),
        (("global_batch = 8", ""), r"give global_batch or rank_batch"),
        (("global_batch = 8", "global_batch = 8\nrank_batch = 8"), r"global_batch and rank_batch exclude each other"),
        (('root = "x"', ""), r"data\.root is missing"),
        (("epochs = 2", "epochs = 2 2"), r"not valid TOML: .*line 2"),
        (('name = "resnet18"', 'name = "resnet18"\narguments = { num_classes = 5 }'), r"model: num_classes is counted"),
        (("epochs = 2", "epochs = 2\naugment = { mixup = 1, repeats = 5 }"), r"repeats = 5 .* of 8; .* at least 10"),
        (("epochs = 2", "epochs = 2\naugment.color_jitter = [0.4, 0.4, 0.4]"),
         r"augment\.color_jitter: should be one number, or four \(b.* hue up to 0\.5\), got \[0\.4, 0\.4, 0\.4\]$"),
        (("epochs = 2", "epochs = 2\naugment.color_jitter = [0, 0, 0, 0.6]"), r"color_jitter: should be one number"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_file_and_key(tmp_path: Path, change: tuple[str, str], line: str) -> None:
    path = write(tmp_path, MINIMAL.replace(*change))
    with pytest.raises(UserError) as raised:
        load_recipe(path)
    assert re.search(line, str(raised.value)), raised.value
    assert str(raised.value).startswith(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"augment.rand_ops": 3}, 'augment: rand_ops is for policy = "rand", and does nothing here; leave it out'),
        ({"augment.policy": "trivial", "augment.rand_magnitude": 3}, 'rand_magnitude is for policy = "rand"'),
        ({"augment.erase_fill": "mean"}, "erase_fill is for erase > 0"),
        ({"augment.mixup": 1, "augment.cutmix_share": 0.1}, "cutmix_share is for mixup and cutmix together"),
        ({"augment.mix_share": 0.5}, "mix_share is for mixup or cutmix"),
        ({"augment.mix_each": "pair"}, "mix_each is for mixup or cutmix"),
        ({"augment.mix_epochs": 0}, "mix_epochs is for mixup or cutmix"),
        ({"augment.mixup": 1, "augment.mix_share": 0}, "mixup is for mix_share > 0"),
        ({"augment.cutmix": 1, "augment.mix_epochs": 0}, "cutmix is for mix_epochs > 0"),
        ({"schedule.power": 1.0}, 'schedule: power is for name = "polynomial"'),
        ({"schedule.peak": 0.5}, 'peak is for name = "one_cycle"'),
        ({"schedule.step_epochs": 2}, 'step_epochs is for name = "step"'),
        ({"schedule.step_factor": 0.5}, 'step_factor is for name = "step"'),
        ({"ema.decay": 0.9, "ema.warmup_gamma": 2.0}, "ema: warmup_gamma is for warmup = true"),
        ({"ema.decay": 0.9, "ema.warmup_power": 0.75}, "warmup_power is for warmup = true"),
        ({"optim.accum_iter": 2}, 'optim: accum_iter is for name = "accumadam" or "accumadamw"'),
    ],
)
def test_a_key_that_would_do_nothing_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as raised:
        load_recipe("tiny", changes)
    assert line in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("arguments", [{"a": None}, {"a": [1, {"b": None}]}])
@pytest.mark.parametrize("section", ["model", "optim"])
def test_arguments_have_no_none(section: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"{section}\.arguments: None cannot be written in TOML"):
        load_recipe("tiny", {f"{section}.arguments": arguments})


@pytest.mark.parametrize(
    ("phases", "line"),
    [
        ("[[phases]]\nepochs = 2\n[[phases]]\nepochs = [3, 4]\n", "phases.1 starts at epoch 3, but the one before"),
        ("[[phases]]\nepochs = [2, 2]\n", "phases.0: the range of epochs [2, 2) is empty"),
        ("[[phases]]\nepochs = 'x'\n", "phases.0.epochs: should be a valid integer"),
        ("[[phases]]\nepochs = 1\npixels = 3\n", "unknown key phases.0.pixels; did you mean phases.px?"),
        ("[[phases]]\nepochs = 1\nlr = [-1.0, 0.0]\n", "phases.0: lr must not be negative"),
        ("[[phases]]\nepochs = 1\nglobal_batch=1\nrank_batch = 2\n", "phases.0: global_batch and rank_batch exclude"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_phase_names_it(tmp_path: Path, phases: str, line: str) -> None:
    with pytest.raises(UserError) as raised:
        load_recipe(write(tmp_path, MINIMAL.replace("epochs = 2", "") + phases))
    assert line in str(raised.value)


def test_epochs_and_phases_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"phases\.0\.epochs"):
        load_recipe(write(tmp_path, MINIMAL + "[[phases]]\nepochs = 1\n"))


def test_set_reaches_any_key(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL.replace("epochs = 2", "") + "[[phases]]\nepochs = 1\n")
    changes = parse_changes(
        [
            "optim.lr=0.4",
            "phases.0.px=128",
            "model.name=vgg11",
            "model.arguments.drop_rate=0.5",
            "phases.0.lr=[0.1, 0.2]",
        ]
    )
    recipe = load_recipe(path, changes)
    assert recipe.optim.lr == 0.4
    assert recipe.phases[0].px == 128
    assert recipe.phases[0].lr == (0.1, 0.2)
    assert recipe.model.name == "vgg11"
    assert recipe.model.arguments == {"drop_rate": 0.5}


@pytest.mark.parametrize(
    ("assignment", "line"),
    [
        ("optim.lrr=1", "--set optim.lrr: unknown key optim.lrr; did you mean optim.lr?"),
        ("optim.lr=fast", '--set optim.lr: optim.lr: should be a valid number, got "fast"'),
        ("optim.lr", "--set optim.lr: write it as KEY=VALUE, for example --set optim.lr=0.4"),
        ("=3", "--set =3: write it as KEY=VALUE"),
        ("optim.lr.x=1", "--set optim.lr.x: lr is a value, it has no keys below it"),
        ("phases.0.px=9", "--set phases.0.px: the recipe has no phases to count into"),
    ],
)
def test_a_mistake_in_set_names_it(tmp_path: Path, assignment: str, line: str) -> None:
    path = write(tmp_path, MINIMAL)
    with pytest.raises(UserError) as raised:
        load_recipe(path, parse_changes([assignment]))
    assert str(raised.value).startswith(line)


def test_an_index_beyond_the_phases_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL.replace("epochs = 2", "") + "[[phases]]\nepochs = 1\n")
    with pytest.raises(UserError, match="'1' is not one of its 1 entries"):
        load_recipe(path, {"phases.1.px": 64})


def test_a_wrong_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="no recipe 'smok'; did you mean smoke"):
        load_recipe("smok")
    with pytest.raises(UserError, match=r"cannot read the recipe nowhere/x\.toml: No such file"):
        load_recipe("nowhere/x.toml")


@pytest.mark.parametrize("name", built_in_names())
def test_the_resolved_text_is_the_same_recipe(tmp_path: Path, name: str) -> None:
    recipe = load_recipe(name, {"model.arguments": {"a b": [1, "ü\n\"'"], "🙂": {"\x7f": 1e-9}}})
    for explain in (False, True):
        assert load_recipe(write(tmp_path, to_toml(recipe, explain=explain))) == recipe


def test_an_explained_recipe_names_every_key(tmp_path: Path) -> None:
    text = MINIMAL.replace("epochs = 2", "") + "[[phases]]\nepochs = 1\n[[phases]]\nepochs = 2\nlr = [0.1, 0.4]\n"
    recipe = load_recipe(write(tmp_path, text))
    shown = to_toml(recipe, explain=True)
    assert "when their norm, over all parameters, is larger.\n# clip_norm is not set\n" in shown
    assert "\n# demo is not set\n" in shown
    assert load_recipe(write(tmp_path, shown)) == recipe
    for section in (Recipe, *(field.annotation for field in Recipe.model_fields.values())):
        for key in getattr(section, "model_fields", {}):
            assert re.search(rf"^(# {key} is not set|{key} = .*|\[\[?{key}\]\]?)$", shown, re.MULTILINE), key
    assert shown.count("# data_copy is not set") == 1  # only the first of several entries is explained
    assert "is not set" not in to_toml(recipe)


@pytest.mark.parametrize("name", built_in_names())
def test_the_head_says_command_hardware_hours_accuracy(name: str) -> None:
    from fortyfold.spec.recipe_file import read_text

    text = read_text(name)[1]
    for word in ("command", "hardware", "hours", "accuracy"):
        assert re.search(rf"^# {word} +\S", text, re.MULTILINE), word


def test_every_field_is_documented() -> None:
    sections = [Recipe]
    while sections:
        section = sections.pop()
        for name, field in section.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, Recipe.__bases__[0]):
                sections.append(inner)  # type: ignore[arg-type]
            else:
                assert field.description, f"{section.__name__}.{name}"


def test_flatten_names_leaves() -> None:
    flat = flatten(load_recipe("tiny"))
    assert flat["optim.lr"] == 0.05
    assert flat["phases"] == []
    assert flat["data.demo.images"] == 300
