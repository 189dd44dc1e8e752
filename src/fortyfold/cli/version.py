"""`fortyfold version`"""

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

PACKAGES = ("torch", "timm", "numpy", "pillow", "safetensors", "pydantic")


def version() -> None:
    """Print the versions of fortyfold and of what it runs on."""
    from fortyfold.data import decode

    print(f"fortyfold {version_of('fortyfold')}")
    print(f"  python      {platform.python_version()}")
    for package in PACKAGES:
        print(f"  {package:<11} {_version_or_absent(package)}")
    print(f"  decoder     {decode.NAME}")


def _version_or_absent(package: str) -> str:
    try:
        return version_of(package)
    except PackageNotFoundError:
        return "not installed"
