"""fortyfold: one command trains an ImageNet-class model anywhere and says where the time went."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("fortyfold")
