"""What is installed here, of all that the weights may depend on."""

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("fortyfold", "torch", "torchvision", "timm", "numpy", "pillow", "safetensors")


def installed_versions() -> dict[str, str]:
    """Python's and the packages', by name; "none" where there is none."""
    return {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
