"""Statistics of normalisation layers, estimated anew: those of a mean of networks are not the mean of theirs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from fortyfold.data.reader import Batch
from fortyfold.engine.device import Feeder
from fortyfold.parallel.ranks import Ranks

_Layer = torch.nn.modules.batchnorm._BatchNorm


@torch.no_grad()
def reestimate(
    networks: list[torch.nn.Module],
    batches: Iterator[Batch],
    feed: Feeder,
    ranks: Ranks,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Replace running means and variances by those over this rank's `batches`, then by their means over the ranks.

    Only normalisation layers are in training mode for it, so nothing is drawn. Counters, momenta and modes stay.
    """
    layers = [layer for network in networks for layer in network.modules() if isinstance(layer, _Layer)]
    before = [(layer, layer.momentum, layer.training, layer.num_batches_tracked) for layer in layers]
    modes = [(network, network.training) for network in networks]
    for network in networks:
        network.eval()
    for layer in layers:
        layer.momentum = None  # a plain mean over all batches
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked = torch.zeros_like(layer.num_batches_tracked)
        layer.train()
    for batch in batches:
        images = feed(batch).images
        with autocast():
            for network in networks:
                network(images)
    for layer, momentum, training, counter in before:
        layer.momentum, layer.training, layer.num_batches_tracked = momentum, training, counter
    for network, training in modes:
        network.train(training)
    ranks.mean(buffer for layer in layers for buffer in layer.buffers())
