"""torchvision beside a CPU build of torch, where `import torchvision` fails: the operators that its import names are defined before it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
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
    """The module torchvision, with its datasets, transforms and models. Raises UserError where it is missing or its import fails."""
    try:
        define_missing_operators()  # hvdtrain may run from its source, without having been installed
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise UserError(f"torchvision cannot be imported: {error}", sys.executable, "pip install torchvision") from error
    except (ImportError, RuntimeError) as error:
        raise _mismatch(error) from error


def define_missing_operators() -> None:
    """Defines torchvision's operators, without code, where its compiled library cannot be loaded: a CUDA build beside a CPU build of torch.

    PyPI's torchvision is a CUDA build, and its import stops where it refers to the first operator; with this, all but the operators
    themselves works. torch calls this at the end of `import torch` (entry point `torch.backends` in setup.cfg), so that
    `import torchvision` works in any program of this environment. In all other environments it changes nothing.
    """
    import torch

    if _libraries or torch.version.cuda or torch.version.hip or not _is_cuda_build_of_torchvision():
        return
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _libraries.append(library)


def _is_cuda_build_of_torchvision() -> bool:
    """Read from the names of the libraries that its compiled library needs, without loading it."""
    try:
        spec = importlib.util.find_spec("torchvision")
        folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
        return any(b"libtorch_cuda.so" in path.read_bytes() for folder in folders for path in folder.glob("_C*.so"))
    except (OSError, ValueError):  # a module without a spec: not from a package index
        return False


def _mismatch(error: Exception) -> UserError:
    import torch

    what = f"torchvision does not import beside torch {torch.__version__}: {error}"
    return UserError(what, sys.executable, "install the torchvision release that belongs to this torch")
