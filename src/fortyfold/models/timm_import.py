"""The one place that imports timm, which imports torchvision: that must have been imported with some care."""

import fortyfold.torchvision_import  # noqa: F401, I001 (before timm)

import timm
import timm.optim

__all__ = ["timm"]
