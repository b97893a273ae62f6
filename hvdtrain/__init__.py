"""hvdtrain: trains deep networks on many workers, with Horovod or MPI between them and any framework inside one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UserError as UserError
from hvdtrain.version import __version__ as __version__

if TYPE_CHECKING:
    from hvdtrain.api import Run as Run
    from hvdtrain.api import read as read
    from hvdtrain.api import train as train


def __getattr__(name: str) -> Any:
    """train(), read() and Run, imported at their first use: the command line starts faster without them."""
    if name not in ("train", "read", "Run"):
        raise AttributeError(f"module 'hvdtrain' has no attribute '{name}'")
    return getattr(importlib.import_module("hvdtrain.api"), name)
