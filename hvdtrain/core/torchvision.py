"""torchvision, imported beside a CPU build of torch."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from types import ModuleType

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_defined: list[Any] = []  # torch.library.Library: its definitions vanish when it is collected


def torchvision() -> ModuleType:
    """The module torchvision, with its datasets, transforms and models; an installation that imports is left as it is.

    torchvision from PyPI does not load its compiled operators beside a CPU build of torch, and then stops at the first one that it
    describes. Defining the schemas of those two is enough for all but the operators themselves.
    """
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise UserError(f"torchvision cannot be imported: {error}", sys.executable, "pip install torchvision") from error
    except (ImportError, RuntimeError) as error:
        if "torchvision::nms does not exist" not in str(error):
            raise _broken(error) from error
    _define_operators()
    try:
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:
        raise _broken(error) from error


def _define_operators() -> None:
    import torch

    for name in [name for name in sys.modules if name == "torchvision" or name.startswith("torchvision.")]:
        del sys.modules[name]  # the remains of the import that failed
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _defined.append(library)


def _broken(error: Exception) -> UserError:
    import torch

    what = f"torchvision does not import beside torch {torch.__version__}: {error}"
    return UserError(what, sys.executable, "install the torchvision that was made for this torch")
