"""Keeps torch's CPU threads from spinning. To be called before torch is imported."""

import os

from fortyfold.spec.openmp import calm


def calm_openmp() -> None:
    """As spec/openmp.py says, for this process and those that it starts."""
    calm(os.environ)
