"""Mixup and cutmix: the arithmetic is timm's, the draws are pure, and ranks make the same images."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from images import encoded, pixels
from numpy.typing import NDArray

from fortyfold.data import mix as mixing
from fortyfold.data.augment import MIX, MIX_SHARE, uniforms
from fortyfold.data.index import Index
from fortyfold.data.mix import Mix, draw_mix
from fortyfold.data.order import hash_ids
from fortyfold.data.reader import Batch, Reader
from fortyfold.data.requests import BatchShape, Sampler, eval_requests
from fortyfold.data.splits import open_folder
from fortyfold.models.timm_import import timm
from fortyfold.spec.recipe import Augment
from fortyfold.spec.world import World

BOTH = Augment(mixup=0.8, cutmix=1.0)
EACH = ["batch", "pair", "image"]
Floats = NDArray[np.float64]


def changed(**fields: object) -> Augment:
    return Augment.model_validate({**BOTH.model_dump(), **fields})


def apply(mix: Mix | None, images: NDArray[Any], targets: Floats) -> tuple[Floats, Floats]:
    """What a Mix means."""
    if mix is None:
        return images.astype(np.float64), targets
    num_own = len(mix.partners)
    mixed, shares = images[:num_own].astype(np.float64), mix.shares[:, None].astype(np.float64)
    for row, (partner, (left, top, right, bottom)) in enumerate(zip(mix.partners, mix.boxes, strict=True)):
        if right:
            mixed[row, top:bottom, left:right] = images[partner, top:bottom, left:right]
        else:
            mixed[row] = mixed[row] * shares[row] + images[partner] * (1 - shares[row])
    return mixed, targets[:num_own] * shares + targets[mix.partners] * (1 - shares)


def draw(augment: Augment, keys: NDArray[np.int64], batch: int = 0, size: int = 24) -> Mix | None:
    drawn = draw_mix(augment, keys, slice(0, len(keys)), size, size, 7, 2, batch)
    return drawn[0] if drawn else None


@pytest.mark.parametrize("each", EACH)
@pytest.mark.parametrize("kinds", [{}, {"mixup": 0}, {"cutmix": 0}, {"mix_share": 0.5}, {"mixup": 0.2, "cutmix": 5}])
def test_the_arithmetic_is_timms(each: str, kinds: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    augment, count, width, height = changed(mix_each=each, **kinds), 8, 24, 16
    keys = np.arange(50, 50 + count)
    images = np.random.default_rng(0).random((count, height, width, 3))
    labels = np.arange(count) % 5
    order = np.concatenate([np.arange(0, count, 2), np.arange(count - 1, 0, -2)])  # timm mixes i with n - 1 - i
    for batch in range(6 if each == "batch" else 1):
        drawn = draw_mix(augment, keys, slice(0, count), width, height, 7, 2, batch)
        found = apply(drawn[0] if drawn else None, images, np.eye(5)[labels])
        by = {"batch": np.array([batch]), "pair": keys[order[:4]], "image": keys[order]}[each]
        pin_draws(monkeypatch, augment, uniforms(by, 7, 2, MIX, 4), hash_ids(by, 7, 2, MIX_SHARE), (width, height))
        reference = timm.data.mixup.Mixup(
            augment.mixup, augment.cutmix, None, augment.mix_share, augment.cutmix_share,
            {"image": "elem"}.get(each, each), label_smoothing=0, num_classes=5,
        )  # fmt: skip
        nchw = torch.from_numpy(images[order]).permute(0, 3, 1, 2).clone()
        theirs, targets = reference(nchw, torch.from_numpy(labels[order]))
        assert np.allclose(found[0][order], theirs.permute(0, 2, 3, 1).numpy(), atol=1e-6)
        assert np.allclose(found[1][order], targets.numpy(), atol=1e-6)


def pin_draws(
    monkeypatch: pytest.MonkeyPatch, augment: Augment, draws: Floats, hashes: Any, size: tuple[int, int]
) -> None:
    """Let timm draw what we drew."""
    either = augment.mixup > 0 and augment.cutmix > 0
    cut = draws[:, 1] < augment.cutmix_share if either else np.full(len(draws), augment.cutmix > 0)
    betas = mixing._draw_betas(hashes, np.where(cut, augment.cutmix, augment.mixup)).astype(np.float64)
    together = augment.mix_each != "batch"  # then timm asks whether to mix at all last
    uniform = [*([draws[:, 1]] if either else []), draws[:, 0]] if together else [draws[:, 0], draws[:, 1]]
    asked = iter(uniform if together else [column[0] for column in uniform])
    mixed = (draws[:, 0] < augment.mix_share) & (betas != 1) & cut
    centres: Iterator[int] = iter(
        (draws[mixed][:, [3, 2]] * np.array(size)[::-1]).astype(int).ravel().tolist()
    )  # y before x
    monkeypatch.setattr(np.random, "rand", lambda *_: next(asked))
    monkeypatch.setattr(np.random, "beta", lambda *_, size=None: betas if size else betas[0])
    monkeypatch.setattr(np.random, "randint", lambda *_, size=None: next(centres))


def test_the_draws_are_the_same_on_every_machine_and_in_every_release() -> None:
    mix = draw(changed(mix_each="image"), np.arange(4))
    assert mix is not None
    assert mix.shares.tolist() == pytest.approx([0.78125, 0.37602, 0.30155, 0.635417], abs=1e-6)
    assert mix.boxes.tolist() == [[0, 0, 14, 9], [0, 0, 0, 0], [0, 0, 0, 0], [0, 9, 14, 24]]
    assert mix.partners.tolist() == [1, 0, 3, 2]


def test_the_shares_are_distributed_as_asked() -> None:
    keys = np.arange(4000)
    mix = draw(changed(mix_each="image", mixup=0.4, cutmix=1, mix_share=0.75, cutmix_share=0.4), keys, size=1000)
    assert mix is not None
    cut, left_alone = mix.boxes[:, 2] > 0, mix.shares == 1
    assert left_alone.mean() == pytest.approx(0.25, abs=0.03)
    assert cut[~left_alone].mean() == pytest.approx(0.4, abs=0.03)
    blended = mix.shares[~left_alone & ~cut]
    assert blended.mean() == pytest.approx(0.5, abs=0.03)
    assert blended.var() == pytest.approx(0.25 / (2 * 0.4 + 1), abs=0.01)  # Beta(a, a)'s
    centred = (mix.boxes[cut, 0] > 0) & (mix.boxes[cut, 2] < 1000)
    assert 0.1 < centred.mean() < 0.9 and mix.boxes[cut].min() == 0 and mix.boxes[cut].max() == 1000


def test_what_has_a_draw_of_its_own() -> None:
    keys = np.arange(100, 109)
    mixes = {each: draw(changed(mix_each=each, mixup=1, cutmix=0), keys) for each in EACH}
    shares = {each: mix.shares.tolist() for each, mix in mixes.items() if mix is not None}
    assert [row[8] for row in shares.values()] == [1, 1, 1]  # the ninth has no partner
    assert len(set(shares["batch"][:8])) == 1
    assert shares["pair"][0:8:2] == shares["pair"][1:8:2] and len(set(shares["pair"][:8])) == 4
    assert len(set(shares["image"][:8])) == 8
    other = draw(changed(mix_each="batch", mixup=1, cutmix=0), keys, batch=1)
    assert other is not None and other.shares[0] != shares["batch"][0]


@pytest.fixture(scope="module")
def some_bad(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """60 images, four of which cannot be read."""
    folder = tmp_path_factory.mktemp("mix")
    for number in range(60):
        place = folder / "ab"[number % 2] / f"{number:02d}.jpg"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(b"no" if number % 15 == 4 else encoded(pixels(40, 32, number)))
    return open_folder(folder)


def batches(index: Index, augment: Augment, world: World, epoch: int = 1) -> list[Batch]:
    """An epoch in batches of 12 and 13 images at 16 pixels."""
    index.known_headers[:] = 0
    sampler, shape = Sampler(3, world=world, augment=augment), BatchShape(-(-len(index) // 13), 13, 16, 0.3)
    return list(Reader(2).stream(sampler.request(index, epoch, batch, shape) for batch in range(shape.num_batches)))


@pytest.mark.parametrize("each", EACH)
def test_any_number_of_ranks_makes_the_same_mixed_images(some_bad: Index, each: str) -> None:
    augment = changed(mix_each=each, mix_share=0.8)

    def mixed(batch: Batch) -> tuple[Floats, Floats]:
        return apply(batch.mix, batch.images_nhwc, np.eye(2)[batch.labels])

    whole = batches(some_bad, augment, World())
    assert sum(batch.mix is not None for batch in whole) >= 2
    extra = 0
    for size in (2, 3, 4):
        shares = [batches(some_bad, augment, World(size, rank)) for rank in range(size)]
        for batch, parts in zip(whole, zip(*shares, strict=True), strict=True):
            assert np.concatenate([part.ids for part in parts]).tolist() == batch.ids.tolist()
            assert sorted(entry for part in parts for entry in part.bad) == batch.bad
            for made, wanted in zip(zip(*map(mixed, parts), strict=True), mixed(batch), strict=True):
                assert np.array_equal(np.concatenate(made), wanted)
            for part in parts:
                num_extra = len(part.images_nhwc) - len(part)
                assert len(part.labels) == len(part.weights) == len(part) + num_extra
                assert num_extra <= 2 and (num_extra == 0 or part.mix is not None)
                extra += num_extra
    assert extra > 0


def test_an_unreadable_image_is_not_mixed_and_neither_is_its_partner(some_bad: Index) -> None:
    seen = 0
    for batch in batches(some_bad, changed(mix_each="pair"), World()):
        assert batch.mix is not None
        for row in np.flatnonzero(batch.weights == 0):
            pair = [int(row), int(batch.mix.partners[row])]
            assert (batch.mix.shares[pair] == 1).all() and (batch.mix.boxes[pair] == 0).all()
            seen += 1
    assert seen == 4


def test_it_mixes_only_where_the_recipe_says_so(some_bad: Index) -> None:
    def any_mix(augment: Augment, epoch: int) -> bool:
        return any(batch.mix is not None for batch in batches(some_bad, augment, World(), epoch))

    assert any_mix(changed(mix_epochs=2), 1)
    assert not any_mix(changed(mix_epochs=2), 2)
    assert not any_mix(Augment(), 1)
    assert all(batch.mix is None for batch in Reader(1).stream(eval_requests(some_bad, 16, 1.0, 30)))


def test_mixing_changes_neither_order_nor_pixels(some_bad: Index) -> None:
    for plain, mixed in zip(batches(some_bad, Augment(), World()), batches(some_bad, BOTH, World()), strict=True):
        assert np.array_equal(plain.ids, mixed.ids)
        assert np.array_equal(plain.images_nhwc, mixed.images_nhwc[: len(plain)])
