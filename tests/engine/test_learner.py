"""A step, and what a recipe can say about it: losses, mixing, clipping, accumulation, precision, averages."""

import os
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from learners import make_batch, make_learner, plain_model, recipe, take_step, train_steps
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fortyfold.data.mix import Mix
from fortyfold.engine.accum_adam import AccumAdam, AccumAdamW
from fortyfold.engine.device import DeviceBatch, Feeder
from fortyfold.engine.ema import Ema
from fortyfold.engine.learner import Learner
from fortyfold.engine.loss import build_loss, targets, weighted_mean
from fortyfold.engine.memory import is_out_of_memory, remember
from fortyfold.engine.mixing import mix_images
from fortyfold.engine.optimizer import build_optimizer, parameter_groups
from fortyfold.engine.precision import numerics, try_compiler
from fortyfold.models.build import build_model
from fortyfold.models.timm_import import timm
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.recipe import Data, Loss, Model, Optim, Precision

CPU = torch.device("cpu")
DATA = Data(root="x")


def feeder() -> Feeder:
    return Feeder(CPU, DATA, True)


class TestOptimizer:
    @pytest.mark.parametrize("everywhere", [False, True])
    def test_weight_decay_is_kept_off_norms_and_biases(self, everywhere: bool) -> None:
        model = build_model(Model(name="test_resnet"), 3)
        optimizer = build_optimizer(model, Optim(lr=0.1, weight_decay=0.01, decay_norm_and_bias=everywhere))
        decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
        for name, parameter in model.named_parameters():
            assert (id(parameter) in decayed) == (everywhere or parameter.ndim > 1), name

    def test_names_mean_what_they_say(self) -> None:
        kinds = {name: build_optimizer(plain_model(), Optim(name=name, lr=0.1)) for name in ("sgd", "nesterov", "adam")}
        assert isinstance(kinds["sgd"], torch.optim.SGD) and not kinds["sgd"].defaults["nesterov"]
        assert isinstance(kinds["nesterov"], torch.optim.SGD) and kinds["nesterov"].defaults["nesterov"]
        assert kinds["sgd"].defaults["momentum"] == 0.9
        assert type(kinds["adam"]) is torch.optim.Adam
        ahead = build_optimizer(plain_model(), Optim(name="lookahead_sgd", lr=0.1))
        assert not ahead.defaults["nesterov"]

    def test_arguments_reach_the_optimiser(self) -> None:
        optimizer = build_optimizer(plain_model(), Optim(name="lamb", lr=0.1, arguments={"betas": [0.8, 0.9]}))
        assert list(optimizer.defaults["betas"]) == [0.8, 0.9]
        accum = build_optimizer(plain_model(), Optim(name="AccumAdamW", lr=0.1, accum_iter=7))
        assert isinstance(accum, AccumAdamW) and accum.defaults["accum_iter"] == 7

    @pytest.mark.parametrize(
        ("optim", "message"),
        [
            ({"name": "adamx"}, "no optimiser 'adamx'; did you mean adam"),
            ({"name": "adahessian"}, "adahessian wants second derivatives"),
            ({"name": "adamw", "arguments": {"colour": 3}}, "adamw with {'colour': 3} cannot be had: .*colour"),
            ({"name": "accumadam", "arguments": {"colour": 3}}, "accumadam with .* cannot be had: .*colour"),
            ({"name": "fusedsgd"}, "fusedsgd with {} cannot be had: CUDA required"),
            ({"name": "lookahead_adahessian"}, "adahessian wants second derivatives"),
            ({"name": "lookahead_accumadam"}, "no optimiser 'lookahead_accumadam'; did you mean"),
            ({"name": "accumadam", "arguments": {"betas": [0.9, 1.5]}}, "accumadam with .* cannot be had: betas"),
            ({"name": "nesterov", "arguments": {"betas": [0.9, 0.9]}}, "cannot be had: it has no betas"),
            ({"decay_by_name": {"haed.*": 0.1}}, r"no parameter fits 'haed\.\*'"),
        ],
    )
    def test_a_mistake_is_one_line(self, optim: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            build_optimizer(plain_model(), Optim(lr=0.1, **optim))

    def test_weight_decay_by_name(self) -> None:
        model = build_model(Model(name="test_resnet"), 3)
        decays = {"*.bn1.*": 0.3, "fc.weight": 0.4, "fc.*": 0.5}
        groups = parameter_groups(model, Optim(lr=0.1, weight_decay=0.01, decay_by_name=decays))
        decay_of = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
        assert len(decay_of) == len(list(model.parameters()))
        for name, parameter in model.named_parameters():
            expected = {"fc.weight": 0.4, "fc.bias": 0.5}.get(name, 0.01 if parameter.ndim > 1 else 0.0)
            assert decay_of[id(parameter)] == (0.3 if ".bn1." in name else expected), name

    def test_layer_decay_scales_the_learning_rate(self) -> None:
        learner = Learner(build_model(Model(name="test_vit"), 3), recipe(optim={"lr": 1.0, "layer_decay": 0.5}))
        batch = DeviceBatch(torch.zeros(2, 3, 160, 160), torch.tensor([0, 1]), torch.ones(2))
        take_step(learner, batch, 1, lr=0.25)
        rates = {group["lr"] for group in learner.optimizer.param_groups}
        assert max(rates) == 0.25 and 0.125 in rates and min(rates) < 0.05


def gradients_for(parameters: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


class TestAccumAdam:
    @pytest.mark.parametrize(("own", "torchs"), [(AccumAdam, torch.optim.Adam), (AccumAdamW, torch.optim.AdamW)])
    def test_with_one_step_it_is_adam(self, own: type[AccumAdam], torchs: type[torch.optim.Adam]) -> None:
        ours, theirs = ([torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))] for _ in range(2))
        one = own(ours, lr=0.01, weight_decay=0.1, accum_iter=1)
        other = torchs(theirs, lr=0.01, weight_decay=0.1, foreach=True)
        for step in range(20):
            for parameters, optimizer in ((ours, one), (theirs, other)):
                gradients_for(parameters, step)
                optimizer.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)

    def test_moments_take_in_the_mean_of_four_gradients(self) -> None:
        """By hand: gradients 1, 2, 3, 6 (mean 3), then 5; betas 0.5 and 0.75."""
        weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = AccumAdam([weight], lr=1.0, betas=(0.5, 0.75), eps=0.0, accum_iter=4)
        moved = []
        for gradient in (1.0, 2.0, 3.0, 6.0, 5.0):
            before = weight.item()
            weight.grad = torch.tensor([gradient], dtype=torch.float64)
            optimizer.step()
            moved.append(before - weight.item())
            state = optimizer.state[weight]
            if gradient == 6.0:
                assert state["exp_avg"].item() == 0.5 * 3  # half of the mean
                assert state["exp_avg_sq"].item() == 0.25 * 9
                assert state["gradient_sum"].item() == 0
        assert moved[:4] == pytest.approx([1, 1, 1, 1])  # moments of one gradient only: g / sqrt(g²)
        first, second = (0.5 * 1.5 + 0.5 * 5) / (1 - 0.5**2), (0.75 * 2.25 + 0.25 * 25) / (1 - 0.75**2)
        assert moved[4] == pytest.approx(first / second**0.5)
        assert state["exp_avg"].item() == 1.5  # untouched until the eighth

    def test_a_parameter_that_was_not_used_keeps_its_own_count(self) -> None:
        used, seldom = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        optimizer = AccumAdam([used, seldom], lr=0.1, accum_iter=2)
        for step in range(3):
            used.grad = torch.ones(1)
            seldom.grad = torch.ones(1) if step == 1 else None
            optimizer.step()
        assert (optimizer.state[used]["step"], optimizer.state[seldom]["step"]) == (3, 1)
        assert optimizer.state[seldom]["exp_avg"].item() == 0 != optimizer.state[used]["exp_avg"].item()


class TestLoss:
    def test_it_is_the_mean_and_an_unreadable_images_place_counts_nothing(self) -> None:
        model, feed, criterion = plain_model(), feeder(), build_loss(Loss(label_smoothing=0.1))
        batch = make_batch()
        whole = feed(batch)
        expected = functional.cross_entropy(model(whole.images), whole.labels, label_smoothing=0.1)
        torch.testing.assert_close(weighted_mean(criterion(model(whole.images), whole), whole.weights, 6), expected)

        batch.weights[2] = 0
        gradients = []
        for pixel in (0, 255):
            batch.images_nhwc[2] = pixel
            model.zero_grad()
            fed = feed(batch)
            weighted_mean(criterion(model(fed.images), fed), fed.weights, 6).backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @pytest.mark.parametrize("threshold", [None, 0.2])
    @pytest.mark.parametrize("sums", [False, True])
    def test_bce_is_timms(self, smoothing: float, threshold: float | None, sums: bool) -> None:
        logits, labels = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 1])
        ours = build_loss(Loss(name="bce", label_smoothing=smoothing, bce_threshold=threshold, bce_sum_classes=sums))
        theirs = timm.loss.BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold, sum_classes=sums)
        batch = DeviceBatch(torch.zeros(5, 1), labels, torch.ones(5))
        torch.testing.assert_close(ours(logits, batch).mean(), theirs(logits, labels))

        others, shares = labels.flip(0), torch.tensor([0.3, 0.9, 1.0, 0.5, 0.7])
        mixed = DeviceBatch(torch.zeros(5, 1), labels, torch.ones(5), others, shares)
        dense = timm.data.mixup.mixup_target(
            labels, 4, shares[:, None], smoothing
        )  # pairs i with n-1-i, as others does
        torch.testing.assert_close(ours(logits, mixed).mean(), theirs(logits, dense))

    def test_cross_entropy_of_mixed_and_of_soft_labels_is_timms(self) -> None:
        logits, labels = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1])
        shares = torch.tensor([0.3, 0.9, 0.9, 0.3])
        mixed = DeviceBatch(torch.zeros(4, 1), labels, torch.ones(4), labels.flip(0), shares)
        dense = timm.data.mixup.mixup_target(labels, 3, shares[:, None], 0.1)
        expected = timm.loss.SoftTargetCrossEntropy()(logits, dense)
        torch.testing.assert_close(build_loss(Loss(label_smoothing=0.1))(logits, mixed).mean(), expected)
        soft = DeviceBatch(torch.zeros(4, 1), targets(mixed, 3), torch.ones(4))
        torch.testing.assert_close(build_loss(Loss(label_smoothing=0.1))(logits, soft).mean(), expected)


class TestMixing:
    @pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
    @pytest.mark.parametrize("cut", [False, True])
    def test_images_are_mixed_as_timm_does(self, mode: str, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        shares = {"batch": [0.4] * 6, "pair": [0.4, 0.5, 1.0, 1.0, 0.5, 0.4], "elem": [0.1, 0.2, 1.0, 0.6, 0.7, 0.8]}
        box, area = (2, 1, 5, 7), 18 / 64  # left, top, right, bottom

        def drawn(shape: Any, share: float, **options: Any) -> tuple[tuple[int, ...], float]:
            return (box[1], box[3], box[0], box[2]), 1 - area

        monkeypatch.setattr(timm.data.mixup, "cutmix_bbox_and_lam", drawn)
        theirs = timm.data.Mixup(mode=mode, num_classes=3)
        count = 3 if mode == "pair" else 6
        wanted = np.array(shares[mode], np.float32)
        theirs._params_per_elem = lambda n: (wanted[:count].copy(), np.full(count, cut))
        theirs._params_per_batch = lambda: (0.4, cut)
        labels = torch.tensor([0, 1, 2, 1, 0, 2])
        expected, dense = theirs(images.clone(), labels)

        unmixed = wanted == 1
        boxes = np.where(unmixed[:, None] | (not cut), 0, np.array(box))
        kept = np.where(unmixed | (not cut), wanted, 1 - area).astype(np.float32)
        plan = Mix(np.arange(5, -1, -1), kept, boxes)
        ours = mix_images(images, *(torch.from_numpy(part) for part in (plan.partners, plan.shares, plan.boxes)))
        torch.testing.assert_close(ours, expected)
        smoothed = targets(DeviceBatch(ours, labels, torch.ones(6), labels.flip(0), torch.from_numpy(kept)), 3) * 0.9
        torch.testing.assert_close(smoothed + 0.1 / 3, dense)

    def test_rows_that_are_partners_only_go_no_further(self) -> None:
        batch = make_batch(5)
        whole = feeder()(batch)
        plan = Mix(np.array([1, 0, 4, 3]), np.array([0.5, 0.5, 0.25, 1], np.float32), np.zeros((4, 4), np.int64))
        mixed = feeder()(
            type(batch)(batch.images_nhwc, batch.labels, batch.weights, np.arange(4), mix=plan),
        )
        assert len(mixed) == len(mixed.images) == len(mixed.labels) == 4
        torch.testing.assert_close(mixed.images[2], 0.25 * whole.images[2] + 0.75 * whole.images[4])
        torch.testing.assert_close(mixed.images[3], whole.images[3])
        assert mixed.others is not None and mixed.others.tolist() == batch.labels[[1, 0, 4, 3]].tolist()
        assert mixed.images.is_contiguous(memory_format=torch.channels_last)


class TestStep:
    def test_it_moves_the_weights_down_the_loss(self) -> None:
        learner = Learner(plain_model(), recipe(optim={"lr": 0.05, "name": "sgd"}))
        batch = feeder()(make_batch())
        losses = [take_step(learner, batch, step + 1, lr=0.05).item() for step in range(20)]
        assert losses[-1] < losses[0] / 2

    def test_nothing_in_it_waits_for_the_device(self) -> None:
        """Every wait on CUDA is a read of a number: .item() and the like."""
        reads: list[str] = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                if "_local_scalar_dense" in str(func) or "nonzero" in str(func):
                    reads.append(str(func))
                return func(*args, **(kwargs or {}))

        everything = recipe(
            ema={"decay": 0.9}, precision={"dtype": "bf16"}, loss={"name": "bce", "label_smoothing": 0.1},
            optim={"lr": 0.1, "weight_decay": 0.1, "clip_norm": 1.0, "name": "accumadamw"},
        )  # fmt: skip
        batch = make_batch(px=32)
        plan = Mix(np.arange(5, -1, -1), np.full(6, 0.5, np.float32), np.zeros((6, 4), np.int64))
        mixed = type(batch)(batch.images_nhwc, batch.labels, batch.weights, batch.ids, mix=plan)
        for spec, ready in ((recipe(), batch), (everything, mixed)):
            learner, feed = Learner(build_model(Model(name="test_resnet"), 3).train(), spec), feeder()
            with Watch():  # type: ignore[no-untyped-call]
                take_step(learner, feed(ready), 1, 0.1, accumulate=2)
            assert reads == []
        with Watch():  # type: ignore[no-untyped-call]
            torch.ones(1).item()
        assert len(reads) == 1  # the watch does see one

    def test_four_micro_batches_of_16_are_a_batch_of_64(self) -> None:
        batch = feeder()(make_batch(64))
        ends = []
        for accumulate in (1, 4):
            learner = Learner(plain_model(), recipe(optim={"lr": 0.1, "weight_decay": 0.1}))
            losses = [take_step(learner, batch, step + 1, 0.1, accumulate) for step in range(5)]
            ends.append((torch.stack(losses), list(learner.model.parameters())))
        torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)

    def test_uneven_micro_batches_too_and_never_an_empty_one(self) -> None:
        batch = feeder()(make_batch(7))
        assert [len(part) for part in batch.cut(3)] == [2, 2, 3]
        assert [len(part) for part in batch.cut(9)] == [1] * 7
        whole, cut = (Learner(plain_model(), recipe()) for _ in range(2))
        torch.testing.assert_close(take_step(whole, batch, 1, 0.1), take_step(cut, batch, 1, 0.1, accumulate=3))
        torch.testing.assert_close(list(whole.model.parameters()), list(cut.model.parameters()))

    @pytest.mark.parametrize("dtype", ["fp32", "fp16"])
    def test_clipping(self, dtype: str) -> None:
        batch = feeder()(make_batch())
        steps = {}
        for name, clip in (("none", {}), ("norm", {"clip_norm": 1e-3}), ("value", {"clip_value": 1e-4})):
            learner = Learner(
                plain_model(), recipe(optim={"lr": 1.0, "name": "sgd", **clip}, precision={"dtype": dtype})
            )
            take_step(learner, batch, 1, 1.0)
            before = dict(plain_model().named_parameters())
            steps[name] = [(before[key] - value).detach() for key, value in learner.model.named_parameters()]
        norms = {name: torch.cat([step.flatten() for step in values]).norm().item() for name, values in steps.items()}
        assert norms["none"] > 0.1
        assert norms["norm"] == pytest.approx(1e-3, rel=1e-2)
        assert max(step.abs().max().item() for step in steps["value"]) == pytest.approx(1e-4, rel=1e-2)


class TestEma:
    @pytest.mark.parametrize("warmup", [False, True])
    def test_it_is_timms(self, warmup: bool) -> None:
        rise = {"warmup": True, "warmup_gamma": 2.0, "warmup_power": 0.75} if warmup else {}
        learner = make_learner(recipe(ema={"decay": 0.9, **rise}))
        theirs = timm.utils.ModelEmaV3(learner.model, decay=0.9, use_warmup=warmup, warmup_gamma=2.0, warmup_power=0.75)
        for step in range(8):
            train_steps(learner, step, step + 1)
            theirs.update(learner.model, step=step + 1)
        assert learner.ema is not None
        for key, value in learner.ema.module.state_dict().items():
            assert torch.equal(value, theirs.module.state_dict()[key]), key
            assert key.endswith("tracked") or not torch.equal(value, learner.model.state_dict()[key])

    def test_tied_weights_are_averaged_once(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        ema = Ema(model, recipe(ema={"decay": 0.9}).ema)
        with torch.no_grad():
            model.get_parameter("0.weight").add_(1.0)
        before = ema.module.state_dict()["0.weight"].clone()
        ema.update(5)
        torch.testing.assert_close(ema.module.state_dict()["1.weight"], before + 0.1)

    def test_evaluation_mode_and_no_gradients(self) -> None:
        learner = make_learner(recipe(ema={"decay": 0.9}))
        train_steps(learner, 0, 1)
        assert learner.ema is not None
        assert not learner.ema.module.training and learner.model.training
        assert all(parameter.grad is None for parameter in learner.ema.module.parameters())


class TestPrecision:
    def test_forward_computes_in_what_the_recipe_says(self) -> None:
        for dtype, expected in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
            seen: list[torch.dtype] = []
            learner = make_learner(recipe(precision={"dtype": dtype}))
            learner.model[4].register_forward_hook(lambda m, i, out, seen=seen: seen.append(out.dtype))  # type: ignore[index]
            train_steps(learner, 0, 1)
            assert seen == [expected]
            assert {parameter.dtype for parameter in learner.model.parameters()} == {torch.float32}

    def test_a_fixed_loss_scale_stays_and_a_dynamic_one_falls_at_an_overflow(self) -> None:
        for loss_scale in (512.0, "dynamic"):
            learner = make_learner(recipe(precision={"dtype": "fp16", "loss_scale": loss_scale}))
            first = {key: value.clone() for key, value in learner.model.named_parameters()}
            train_steps(learner, 0, 4)  # the dynamic scale starts high and falls until nothing overflows
            before = {key: value.clone() for key, value in learner.model.named_parameters()}
            assert not torch.equal(before["0.weight"], first["0.weight"])
            assert learner.scaler is not None
            scale = learner.scaler.state()["scale"]
            images = torch.full((6, 3, 8, 8), 6e4)
            take_step(learner, DeviceBatch(images, torch.zeros(6, dtype=torch.int64), torch.ones(6)), 5, 0.1)
            assert learner.scaler.state()["scale"] == (512 if loss_scale == 512 else scale / 2)
            for key, value in learner.model.named_parameters():
                assert torch.equal(value, before[key]), key  # the step that overflowed was left out

    def test_a_scale_with_which_no_weight_moves_ends_the_run(self) -> None:
        learner = make_learner(recipe(precision={"dtype": "fp16", "loss_scale": 1e12}))
        with pytest.raises(RunFailed, match=r"gradients of 50 steps in a row overflowed in fp16.*loss scale 1e\+12"):
            train_steps(learner, 0, 60)

    def test_switches_are_set_and_set_back(self) -> None:
        def switches() -> tuple[object, ...]:
            return (
                torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision(),
                torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark,
            )  # fmt: skip

        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with numerics(Precision(deterministic=True)):
                assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        finally:
            torch.use_deterministic_algorithms(False)
        before = switches()
        with numerics(Precision()):
            assert switches() == (False, "highest", False, True)
        with numerics(Precision(tf32=True, deterministic=True)):
            assert switches() == (True, "high", True, False)
        assert switches() == before

    def test_a_compiler_that_is_missing_is_told_in_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(function: object) -> object:
            raise RuntimeError("\nno working C++ compiler\nmore")

        monkeypatch.setattr(torch, "compile", broken)
        assert try_compiler(CPU) == "no working C++ compiler"


class TestMemory:
    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory"),
            RuntimeError("can't allocate memory: you tried"),
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            MemoryError(),
        ],
    )
    def test_it_is_known_by_many_names(self, error: Exception) -> None:
        assert is_out_of_memory(error)
        assert not is_out_of_memory(RuntimeError("shapes differ"))

    def test_a_batch_that_does_not_fit_leaves_nothing_behind(self) -> None:
        learner, calm = make_learner(recipe()), make_learner(recipe())
        generator = torch.get_rng_state()
        train_steps(calm, 0, 1)
        torch.set_rng_state(generator)
        put_back, held = remember(learner), []

        def fail(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            held.append(weakref.ref(output))
            raise torch.OutOfMemoryError("CUDA out of memory")

        hook = learner.model[4].register_forward_hook(fail)  # type: ignore[index]
        with suppress(torch.OutOfMemoryError):
            train_steps(learner, 0, 1)
        put_back()
        assert held[0]() is None
        hook.remove()
        train_steps(learner, 0, 1)
        for key, value in learner.model.state_dict().items():
            assert torch.equal(value, calm.model.state_dict()[key]), key
