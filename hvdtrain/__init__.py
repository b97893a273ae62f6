"""hvdtrain: trains deep networks on many workers, with Horovod or MPI between them and any framework inside one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdtrain.api import Run as Run
    from hvdtrain.api import read as read
    from hvdtrain.api import train as train
    from hvdtrain.errors import UserError as UserError

from hvdtrain.version import __version__ as __version__

_HOMES = {"train": "api", "read": "api", "Run": "api", "UserError": "errors"}


def __getattr__(name: str) -> Any:
    """What scripts use, imported when they do: the command line starts faster without."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hvdtrain' has no attribute '{name}'")
    return getattr(importlib.import_module(f"hvdtrain.{_HOMES[name]}"), name)
