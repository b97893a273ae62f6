"""Imports torchvision's CUDA build beside a CPU build of torch, which fails unless its operators
are defined before."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from types import ModuleType

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_CUDA_LIBRARY = "libtorch_cuda.so"
_lock = threading.Lock()
_libraries: list[
    Any
    # keeps torch.library.Library objects alive: garbage collection would remove their definitions
] = []


def import_torchvision() -> ModuleType:
    """Imports torchvision with its datasets, transforms and models. Raises UserError if it is
    missing or its import fails."""
    try:
        define_missing_operators()
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise UserError(
            f"torchvision cannot be imported: {error}", sys.executable, "pip install torchvision"
        ) from error
    except (ImportError, RuntimeError) as error:
        raise _mismatch(error) from error


def define_missing_operators() -> None:
    """Defines torchvision's operators without code if its compiled library cannot be loaded: a CUDA
    build beside a CPU build of torch.

    PyPI's torchvision is a CUDA build, and its import fails at the first operator. With the
    definitions everything works except the operators themselves. Call it before a library or a
    user's module that may import torchvision; in all other environments it changes nothing, and
    does not import torch.
    """
    if _libraries or "torchvision" in sys.modules or not _is_mismatched():
        return
    import torch

    if (
        _libraries or torch.version.cuda or torch.version.hip
    ):  # an older installation of hvdtrain defines them in this import
        return
    with _lock:
        # two threads get here while torch is imported: one imports the model's libraries, the other
        # builds the task
        if not _libraries:
            library = torch.library.Library("torchvision", "DEF")
            for schema in _SCHEMAS:
                library.define(schema)
            _libraries.append(library)


def _is_mismatched() -> bool:
    """Whether torchvision's compiled library needs a library that torch does not have; nothing is
    loaded."""
    try:
        of_torch = any((folder / "lib" / _CUDA_LIBRARY).exists() for folder in _folders("torch"))
        needed = (
            _CUDA_LIBRARY.encode() in path.read_bytes()
            for folder in _folders("torchvision")
            for path in folder.glob("_C*.so")
        )
        return not of_torch and any(needed)
    except (OSError, ValueError):  # a module without a spec: not from a package index
        return False


def _folders(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def _mismatch(error: Exception) -> UserError:
    import torch

    what = f"torchvision does not import beside torch {torch.__version__}: {error}"
    return UserError(
        what, sys.executable, "install the torchvision release that belongs to this torch"
    )
