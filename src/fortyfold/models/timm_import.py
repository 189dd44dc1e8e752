"""The one place that imports timm, which imports torchvision: that must have been imported with some care."""

import fortyfold.torchvision_import  # noqa: F401, I001 (before timm)

import timm
import timm.data
import timm.layers
import timm.loss
import timm.optim
import timm.scheduler
import timm.utils

__all__ = ["timm"]
