"""hvdtrain trains deep networks on many workers, which communicate through Horovod or MPI and run
any framework."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UserError as UserError
from hvdtrain.version import __version__ as __version__

if TYPE_CHECKING:
    from hvdtrain.api import Run as Run
    from hvdtrain.api import evaluate as evaluate
    from hvdtrain.api import init as init
    from hvdtrain.api import predict as predict
    from hvdtrain.api import read as read
    from hvdtrain.api import run as run
    from hvdtrain.api import train as train
    from hvdtrain.context.context import Context as Context
    from hvdtrain.tasks.user_functions import OwnMetric as OwnMetric
    from hvdtrain.training.hooks import Hook as Hook


__all__ = [
    "Context",
    "Hook",
    "OwnMetric",
    "Run",
    "UserError",
    "__version__",
    "evaluate",
    "init",
    "predict",
    "read",
    "run",
    "train",
]
_AT_FIRST_USE = {  # name -> module: the command line starts faster without them
    **dict.fromkeys(("init", "run", "train", "read", "predict", "evaluate", "Run"), "hvdtrain.api"),
    "Context": "hvdtrain.context.context",
    "OwnMetric": "hvdtrain.tasks.user_functions",
    "Hook": "hvdtrain.training.hooks",
}


def __getattr__(name: str) -> Any:
    """init(), run(), Context, train(), read(), predict(), evaluate(), Run, OwnMetric and Hook.
    Raises AttributeError for another name."""
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module 'hvdtrain' has no attribute '{name}'")
    return getattr(importlib.import_module(_AT_FIRST_USE[name]), name)


def __dir__() -> list[str]:
    """Returns the public names, for completion and dir(), including names not imported yet."""
    return sorted({*globals(), *_AT_FIRST_USE})
