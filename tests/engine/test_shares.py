"""Shares of an evaluation: added up over any number of ranks, they are the whole. (Real ranks: tests/runs.)"""

from pathlib import Path
from typing import Any

import pytest
import torch

from fortyfold.data.reader import Reader
from fortyfold.data.splits import open_split
from fortyfold.engine.device import Feeder
from fortyfold.engine.evaluate import Company, Evaluation, Networks, Views, evaluate_split
from fortyfold.models.build import build_model
from fortyfold.parallel.ranks import Ranks
from fortyfold.spec.recipe_file import load_recipe
from fortyfold.spec.world import World


class Deaf(Ranks):
    """One rank of several that adds up nothing."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather(self, value: Any) -> list[Any]:
        return [value]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 7, 64])
@pytest.mark.parametrize("rectangular", [False, True])
def test_every_image_counts_once(tiny_data: Path, num_ranks: int, rectangular: bool) -> None:
    recipe, index = load_recipe("tiny"), open_split(tiny_data, "val")
    torch.manual_seed(0)
    networks = Networks({"": build_model(recipe.model, 4).eval()})
    views = Views(px=32, crop_ratio=0.875, rectangular=rectangular, flip=False, rank_batch=4, global_batch=16)
    feed = Feeder(torch.device("cpu"), recipe.data, channels_last=True)
    parts: list[Evaluation] = []
    for rank in range(num_ranks):
        company = Company(Deaf(World(num_ranks, rank)))
        scores = evaluate_split(networks, Reader(1), feed, index, views, company)
        assert scores is not None
        parts.append(scores["rect_" if rectangular else ""])
    whole = evaluate_split(networks, Reader(1), feed, index, views)
    assert whole is not None
    expected = whole["rect_" if rectangular else ""]
    assert sum(part.num_images for part in parts) == expected.num_images == 50
    right = sum(part.top1 * part.num_images for part in parts)
    assert right / 50 == pytest.approx(expected.top1)
    loss = sum(part.loss * part.num_images for part in parts)
    assert loss / 50 == pytest.approx(expected.loss, rel=1e-5)
