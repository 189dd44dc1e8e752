"""Policies, jitter and erasing: torchvision's and timm's operations, drawn purely, whatever the number of threads."""

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import encoded, pixels
from numpy.typing import NDArray

from fortyfold.data import Loader, operations
from fortyfold.data.augment import ERASE, uniforms
from fortyfold.data.changes import JITTERED, OPERATIONS, STRONGEST, Changes, Step, draw_changes, reach, step_of
from fortyfold.data.operations import operate
from fortyfold.data.reader import Batch, Reader
from fortyfold.data.requests import BatchShape, Sampler, eval_requests
from fortyfold.data.splits import open_folder
from fortyfold.engine.setup import open_job
from fortyfold.models.timm_import import timm
from fortyfold.spec.errors import UserError
from fortyfold.spec.recipe import Augment
from fortyfold.spec.recipe_file import load_recipe
from fortyfold.spec.run_dir import RunDir
from fortyfold.torchvision_import import functional

v2 = importlib.import_module("torchvision.transforms.v2")
MEAN = (0.485, 0.456, 0.406)
EVERYTHING = Augment(policy="rand", color_jitter=(0.4, 0.4, 0.4, 0.1), erase=0.5)


def picture(px: int = 64, seed: int = 0) -> NDArray[np.uint8]:
    noise = np.random.default_rng(seed).integers(-20, 20, (px, px, 3))
    return np.clip(np.asarray(pixels(px, px, seed)).astype(int) + noise, 9, 240).astype(np.uint8)


def after(step: Step, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    changed = image.copy()
    operate(changed, [step])
    return changed


def chw(image: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(image).permute(2, 0, 1).contiguous()


def magnitude(step: Step) -> float:
    """What torchvision's classes call what we call amount."""
    if step.operation in ("Brightness", "Color", "Contrast", "Sharpness"):
        return step.amount - 1
    return step.amount / 255 if step.operation == "Solarize" else step.amount


@pytest.mark.parametrize("policy", ["rand", "trivial"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_is_that_of_torchvisions_class(policy: str, operation: str) -> None:
    theirs: Any = v2.RandAugment() if policy == "rand" else v2.TrivialAugmentWide()
    assert list(theirs._AUGMENTATION_SPACE) == list(OPERATIONS)
    table, signed = theirs._AUGMENTATION_SPACE[operation]
    strengths = table(STRONGEST + 1, 48, 64)
    changed = 0
    for strength in (0, 1, 9, 17, STRONGEST):
        for sign in (1, -1) if signed else (1,):
            step = step_of(operation, strength, sign, reach(policy, 64, 48))
            wanted = 0.0 if strengths is None else sign * float(strengths[strength])
            found = magnitude(step)
            assert found == pytest.approx(int(wanted) if "Translate" in operation else wanted, rel=1e-5, abs=1e-6)
            image = picture()
            by_class = theirs._apply_image_or_video_transform(
                chw(image), operation, found, v2.InterpolationMode.NEAREST, theirs._fill
            )
            ours = after(step, image)
            assert np.array_equal(ours, by_class.permute(1, 2, 0).numpy()), step
            changed += not np.array_equal(ours, image)
    assert changed or operation == "Identity"


def test_jitter_is_torchvisions_adjusting() -> None:
    image = picture()
    functions = (
        functional.adjust_brightness,
        functional.adjust_contrast,
        functional.adjust_saturation,
        functional.adjust_hue,
    )
    for operation, adjust in zip(JITTERED, functions, strict=True):
        for amount in (-0.3, 0.1, 0.5) if operation == "Hue" else (0.0, 0.6, 1.4, 1.9):
            wanted = adjust(chw(image), amount).permute(1, 2, 0).numpy()
            assert np.array_equal(after(Step(operation, amount), image), wanted), (operation, amount)


def draw(num_images: int, width: int = 64, height: int = 48, **fields: object) -> Changes:
    augment = Augment.model_validate(fields)
    return draw_changes(augment, MEAN, np.arange(num_images), width, height, seed=1, epoch=2)


def test_the_draws_are_the_same_on_every_machine_and_in_every_release() -> None:
    changes = draw(2, policy="rand", color_jitter=0.4, erase=1)
    found = [[(step.operation, round(step.amount, 4)) for step in row] for row in changes.steps]
    assert found == [
        [("Contrast", 0.73), ("AutoContrast", 0), ("Brightness", 0.7612), ("Color", 1.3182), ("Contrast", 1.2822)],
        [("Brightness", 0.73), ("Sharpness", 1.27), ("Brightness", 1.1855), ("Color", 0.8798), ("Contrast", 1.0231)],
    ]  # fmt: skip
    assert changes.erased.tolist() == [[13, 0, 57, 14], [30, 2, 54, 35]]
    assert changes.noise.tolist() == [9184769406108178884, 9967416303305976561]


def test_rand_draws_every_operation_alike_at_one_strength() -> None:
    steps = draw(3000, policy="rand", rand_ops=3, rand_magnitude=12).steps
    assert {len(row) for row in steps} == {3}
    for place in range(3):
        counts = [sum(row[place].operation == operation for row in steps) for operation in OPERATIONS]
        assert min(counts) > 150 and max(counts) < 280  # 214 each on average
    assert {step.amount for row in steps for step in row if step.operation == "Rotate"} == {12.0, -12.0}
    assert {step.amount for row in steps for step in row if step.operation == "TranslateX"} == {11, -11}
    assert {step.amount for row in steps for step in row if step.operation == "TranslateY"} == {8, -8}


def test_trivial_draws_one_operation_of_any_strength() -> None:
    steps = draw(6000, policy="trivial").steps
    assert {len(row) for row in steps} == {1}
    turns = [row[0].amount for row in steps if row[0].operation == "Rotate"]
    assert len(set(np.abs(turns).round(6))) == STRONGEST + 1
    assert min(turns) == -135 and max(turns) == 135
    assert np.mean(np.array(turns) > 0) == pytest.approx(0.5, abs=0.08)
    assert {row[0].amount for row in steps if row[0].operation == "Posterize"} == set(range(2, 9))


def test_jitter_draws_factors_between_their_bounds_in_any_order() -> None:
    steps = draw(4000, color_jitter=[0.4, 1.5, 0.0, 0.1]).steps
    orders = {tuple(step.operation for step in row) for row in steps}
    assert len(orders) == 6 and all(set(order) == {"Brightness", "Contrast", "Hue"} for order in orders)
    for operation, least, most in (("Brightness", 0.6, 1.4), ("Contrast", 0.0, 2.5), ("Hue", -0.1, 0.1)):
        amounts = np.array([step.amount for row in steps for step in row if step.operation == operation])
        assert amounts.min() >= least and amounts.max() <= most
        assert amounts.mean() == pytest.approx((least + most) / 2, abs=0.03 * (most - least))
        assert amounts.std() == pytest.approx((most - least) / 12**0.5, rel=0.03)
    assert {step.operation for row in draw(5, color_jitter=0.3).steps for step in row} == set(JITTERED[:3])


def test_erased_boxes_are_distributed_as_asked() -> None:
    boxes = draw(4000, width=224, height=200, erase=0.4).erased
    erased = boxes[boxes[:, 2] > 0].astype(float)
    assert len(erased) / 4000 == pytest.approx(0.4, abs=0.03)
    sides = erased[:, 2:] - erased[:, :2]
    assert (erased[:, :2] >= 0).all() and (erased[:, 2:] <= [224, 200]).all() and (sides < [224, 200]).all()
    area, ratio = sides.prod(axis=1) / (224 * 200), np.log(sides[:, 1] / sides[:, 0])
    assert area.min() > 0.019 and area.max() < 0.34 and area.max() > 0.3
    assert ratio.min() > np.log(0.29) and ratio.max() < np.log(3.5) and abs(ratio.mean()) < 0.1
    small = area < 0.1  # where every try fits, the draw is the plain one
    assert area[small].mean() == pytest.approx(0.06, abs=0.003)
    assert ratio[small].std() == pytest.approx(2 * np.log(1 / 0.3) / 12**0.5, abs=0.05)
    assert (erased[:, 0] == 0).any() and (erased[:, 2] == 224).any()


class PinnedRandom:
    """What timm's RandomErasing asks `random` for, answered with our draws for one image."""

    def __init__(self, draws: list[float]) -> None:
        self._first, self._tries, self._try = draws[0], np.reshape(draws[1:], (-1, 4)), -1
        self._corner = iter((3, 2))  # top, then left

    def random(self) -> float:
        return self._first

    def uniform(self, least: float, most: float) -> float:
        is_area = least > 0  # the other's logarithm is below
        self._try += is_area
        return float(least + (most - least) * self._tries[self._try, 0 if is_area else 1])

    def randint(self, least: int, most: int) -> int:
        return least + int(self._tries[self._try, next(self._corner)] * (most - least + 1))


def test_erased_boxes_are_the_ones_that_timm_makes_of_the_same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = draw(300, width=40, height=30, erase=0.6).erased
    draws = uniforms(np.arange(300), 1, 2, ERASE, 41).tolist()
    erasing = timm.data.random_erasing.RandomErasing(0.6, device="cpu")
    for box, row in zip(boxes.tolist(), draws, strict=True):
        monkeypatch.setattr(timm.data.random_erasing, "random", PinnedRandom(row))
        theirs, ours = erasing(torch.ones(3, 30, 40)), torch.ones(3, 30, 40)
        ours[:, box[1] : box[3], box[0] : box[2]] = 0
        assert torch.equal(ours, theirs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 images, one of which cannot be read."""
    place = tmp_path_factory.mktemp("changes") / "train" / "a"
    place.mkdir(parents=True)
    for number in range(30):
        (place / f"{number:02d}.jpg").write_bytes(b"no" if number == 7 else encoded(pixels(60, 48, number)))
    return place.parent


def epoch(folder: Path, augment: Augment, threads: int = 2, first_batch: int = 0, **options: Any) -> list[Batch]:
    loader = Loader(folder, threads=threads)
    return list(loader.epoch(1, px=32, rank_batch=8, augment=augment, first_batch=first_batch, **options))


def by_sample(batches: list[Batch]) -> dict[int, bytes]:
    return {
        int(sample): image.tobytes()
        for batch in batches
        for sample, image in zip(batch.ids, batch.images_nhwc, strict=True)
    }


def test_pixels_depend_on_neither_threads_nor_batches_nor_where_it_starts(folder: Path) -> None:
    whole = by_sample(epoch(folder, EVERYTHING, threads=1))
    assert len(whole) == 30 and whole != by_sample(epoch(folder, Augment()))
    for threads in (2, 3):
        assert by_sample(epoch(folder, EVERYTHING, threads=threads)) == whole
    for first_batch in (1, 3):
        rest = by_sample(epoch(folder, EVERYTHING, first_batch=first_batch))
        assert rest.items() <= whole.items() and 0 < len(rest) < 30
    shares = [by_sample(epoch(folder, EVERYTHING, rank=rank, world_size=3)) for rank in range(3)]
    assert shares[0] | shares[1] | shares[2] == whole


@pytest.fixture
def torch_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def bright(seed: int) -> NDArray[np.uint8]:
    """The sum of its grey levels needs more than 24 bits; their mean is a whole number."""
    image = np.repeat(np.random.default_rng(seed).integers(191, 250, (512, 512, 1), np.uint8), 3, axis=2)
    grey = functional.rgb_to_grayscale(chw(image))
    missing = -int(grey.sum(dtype=torch.int64)) % grey.numel()
    image.reshape(-1, 3)[:missing] += 1
    return image


def test_torchs_own_threads_change_nothing(
    monkeypatch: pytest.MonkeyPatch, torch_threads: Callable[[int], None]
) -> None:
    monkeypatch.setattr(operations, "_set_openmp_threads", None)  # so that torch uses them all
    theirs = set()
    for image in map(bright, range(3)):
        grey = functional.rgb_to_grayscale(chw(image))
        mean = int(grey.sum(dtype=torch.int64)) // grey.numel()
        for num_threads in (1, 2, 3, 4):
            torch_threads(num_threads)
            assert (after(Step("Contrast", 0.0), image) == mean).all()
            theirs.add(int(functional.adjust_contrast(chw(image), 0.0)[0, 0, 0]) - mean)
    assert theirs == {-1, 0}  # or this test could not fail


def test_torchs_own_threads_are_left_as_they_are(torch_threads: Callable[[int], None]) -> None:
    for num_threads in (1, 2, 3):
        torch_threads(num_threads)
        after(Step("Contrast", 1.3), picture())
        assert torch.get_num_threads() == num_threads


def test_the_time_it_takes_is_counted_with_resizing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fortyfold.data.reader.change_pixels", lambda *arguments: 1000.0)
    assert all(batch.seconds.resize > 1000 > batch.seconds.decode for batch in epoch(folder, EVERYTHING))


def test_unreadable_images_are_still_named_and_weigh_nothing(folder: Path) -> None:
    batches = epoch(folder, EVERYTHING)
    assert [sample for batch in batches for sample, _ in batch.bad] == [7]
    (place,) = [(batch, row) for batch in batches for row in np.flatnonzero(batch.weights == 0)]
    assert place[0].ids[place[1]] == 7 and place[0].images_nhwc[place[1]].any()


@pytest.mark.parametrize("fill", ["mean", "noise"])
def test_erasing_fills_the_box_and_nothing_else(folder: Path, fill: str) -> None:
    augment = Augment.model_validate({"erase": 1, "erase_fill": fill})
    erased_bytes = []
    for plain, erased in zip(epoch(folder, Augment()), epoch(folder, augment, seed=0), strict=True):
        boxes = draw_changes(augment, MEAN, erased.ids, 32, 32, seed=0, epoch=1).erased
        for before, image, (left, top, right, bottom) in zip(plain.images_nhwc, erased.images_nhwc, boxes, strict=True):
            erased_bytes.append(image[top:bottom, left:right].reshape(-1, 3).copy())
            image[top:bottom, left:right] = before[top:bottom, left:right]
        assert np.array_equal(plain.images_nhwc, erased.images_nhwc)
    found = np.concatenate(erased_bytes)
    if fill == "mean":
        assert (found == [124, 116, 104]).all()
    else:
        counts = np.bincount(found.ravel(), minlength=256)
        assert counts.min() > 0 and found.mean() == pytest.approx(127.5, abs=3)


def test_the_loader_takes_the_recipes_keys(folder: Path) -> None:
    loader, shape = Loader(folder, threads=1), {"px": 32, "rank_batch": 8}
    keys = {"policy": "rand", "color_jitter": [0.4, 0.4, 0.4, 0.1], "erase": 0.5}
    by_keys = list(loader.epoch(1, augment=keys, **shape))  # type: ignore[arg-type]
    section = list(loader.epoch(1, augment=EVERYTHING, **shape))  # type: ignore[arg-type]
    assert by_sample(by_keys) == by_sample(section)


@pytest.mark.parametrize(
    ("augment", "line"),
    [
        ({"policy": "random"}, "augment: policy: should be 'none', 'rand' or 'trivial', got \"random\""),
        ({"polcy": "rand"}, "augment: unknown key polcy; did you mean policy?"),
        ({"rand_ops": 3}, 'augment: rand_ops is for policy = "rand", and does nothing here; leave it out'),
        (
            {"mixup": 1, "repeats": 5},
            "augment.repeats = 5 would mix images with themselves in a global batch of 8; with",
        ),
        ("rand", "augment is a str; give a dict such as {'policy': 'rand'}"),
    ],
)
def test_and_says_what_is_wrong_with_them_in_one_line(folder: Path, augment: Any, line: str) -> None:
    with pytest.raises(UserError) as raised:
        Loader(folder, threads=1).epoch(0, px=16, rank_batch=8, augment=augment)
    assert str(raised.value).startswith(line) and "\n" not in str(raised.value)


def test_evaluation_is_never_changed(folder: Path) -> None:
    assert all(request.changes is None for request in eval_requests(open_folder(folder), 32, 1.0, 8))


def test_who_changes_no_pixel_pays_for_nothing(folder: Path) -> None:
    index, shape = open_folder(folder), BatchShape(4, 8, 32, 0.3)
    assert Sampler(0, augment=Augment(mixup=1)).request(index, 0, 0, shape).changes is None
    code = (
        "import sys; from fortyfold.data import Loader; from fortyfold.spec.recipe import Augment\n"
        f"list(Loader({str(folder)!r}, threads=1).epoch(0, px=16, rank_batch=30, augment=Augment(erase=1)))\n"
        "print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


def test_a_recipes_section_reaches_the_requests(tiny_data: Path, tmp_path: Path) -> None:
    changes = {"data.root": str(tiny_data), "augment.erase": 1, "augment.erase_fill": "mean", "augment.mixup": 1}
    job = open_job(load_recipe("tiny", changes), RunDir(tmp_path / "run"))
    request = job.sampler.request(job.train_index, 0, 0, BatchShape(8, 32, 16, 0.3))
    assert request.mix is not None and request.changes is not None
    assert request.changes().fill == job.recipe.data.mean


def test_the_reader_does_what_a_request_says(folder: Path) -> None:
    index, shape = open_folder(folder), BatchShape(4, 8, 32, 0.3)
    request = Sampler(0, augment=EVERYTHING).request(index, 0, 2, shape)
    assert request.changes is not None
    changes = request.changes()
    (batch,) = Reader(1).stream([request])
    (plain,) = Reader(1).stream([Sampler(0).request(index, 0, 2, shape)])
    for before, image, steps, (left, top, right, bottom) in zip(
        plain.images_nhwc, batch.images_nhwc, changes.steps, changes.erased, strict=True
    ):
        operate(before, steps)
        before[top:bottom, left:right] = image[top:bottom, left:right]
        assert np.array_equal(before, image)
