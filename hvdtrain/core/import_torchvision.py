"""import_torchvision(): torchvision, also beside a CPU build of torch, where `import torchvision` fails."""

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
_libraries: list[Any] = []  # torch.library.Library: its definitions vanish when it is garbage-collected


def import_torchvision() -> ModuleType:
    """The module torchvision, with its datasets, transforms and models.

    torchvision from PyPI does not load its compiled operators beside a CPU build of torch, and its import then stops where it registers
    the first of them. Only in that case the schemas of both operators are defined and the import is tried again: all but the operators
    themselves works. Raises UserError where torchvision is missing or its import fails for another reason.
    """
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise UserError(f"torchvision cannot be imported: {error}", sys.executable, "pip install torchvision") from error
    except (ImportError, RuntimeError) as error:
        if "torchvision::nms does not exist" not in str(error):
            raise _mismatch(error) from error
    _define_operators()
    try:
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:
        raise _mismatch(error) from error


def _define_operators() -> None:
    import torch

    for name in [name for name in sys.modules if name == "torchvision" or name.startswith("torchvision.")]:
        del sys.modules[name]  # left by the import that failed
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _libraries.append(library)


def _mismatch(error: Exception) -> UserError:
    import torch

    what = f"torchvision does not import beside torch {torch.__version__}: {error}"
    return UserError(what, sys.executable, "install the torchvision release that belongs to this torch")
