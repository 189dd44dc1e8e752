"""The network that comm.py's ranks agree on: ResNet-50's sizes, and a gradient for every parameter."""

import torch
from agreeing import METHODS, least_copies
from sleeping import SleepingResNet, layer_sizes, model_bytes

from fortyfold.models.timm_import import timm


def test_its_tensors_have_resnet50s_sizes() -> None:
    with torch.device("meta"):
        resnet = timm.create_model("resnet50")
    wanted = sorted(parameter.numel() for parameter in resnet.parameters())
    assert sorted(size for sizes in layer_sizes() for size in sizes) == wanted
    assert model_bytes() == 4 * sum(wanted)


def test_every_gradient_is_one_and_the_last_layers_come_first() -> None:
    model, arrived = SleepingResNet(0.0), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(int(name.split(".")[1])))
    model(torch.ones(1, requires_grad=True)).sum().backward()
    assert all(parameter.grad is not None and bool((parameter.grad == 1).all()) for parameter in model.parameters())
    assert arrived == sorted(arrived, reverse=True) and len(arrived) == len(list(model.parameters()))


def test_the_least_bytes_of_a_step() -> None:
    copies = {method: least_copies(method, 4) for method in METHODS}
    assert copies == {
        "alone": 0, "allreduce": 1.5, "allreduce-bf16": 0.75, "localsgd": 1.5 / 8,
        "gossip-exponential": 1, "gossip-alternating_exp_ring": 1, "gossip-matching": 1,
        "gossip-ring": 2, "gossip-complete": 3, "decent-dp-ring": 1, "decent-dp-one-peer-exp": 1,
    }  # fmt: skip
