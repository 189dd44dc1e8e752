"""The one place that imports torchvision first, so that it also works beside a CPU build of torch.

torchvision's PyPI wheel is linked to torch's CUDA build. Beside a CPU build its compiled part does not load, and
`import torchvision` fails with "operator torchvision::nms does not exist", because it describes operators that
nobody has declared. Declaring the two is enough for models, optimisers and transforms. Where the compiled part
loads, nothing is declared: declaring an operator twice is an error.
"""

import sys

import torch

_keep_alive: list[torch.library.Library] = []  # a declaration lives as long as its Library


def _import_torchvision() -> None:
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _keep_alive.append(library)
        for module in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[module]


_import_torchvision()

from torchvision.transforms.v2 import functional  # noqa: E402

__all__ = ["functional"]
