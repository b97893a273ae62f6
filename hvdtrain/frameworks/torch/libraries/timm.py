"""model.name=timm:NAME: a model of timm, made for the inputs and outputs of the task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.errors import UserError, nearest, short


def model_of(name: str, where: str) -> Callable[..., torch.nn.Module]:
    """What makes the model. Raises UserError where timm is not installed or has no such model.

    Its options are those of timm.create_model() and of the model's class; in_chans and num_classes are the task's where they are not given.
    """
    timm = _load(where)
    if ":" not in name and not timm.is_model(name.partition(".")[0]):  # hf_hub:OWNER/NAME and local-dir:FOLDER are read when it is made
        raise UserError(f"timm has no model {short(name)}", where, nearest(name, timm.list_models()))

    def make(outputs: int | None = None, shape: Sequence[int] = (), **options: Any) -> torch.nn.Module:
        sizes = {"num_classes": outputs} if outputs else {}
        if len(shape) == 3:
            sizes["in_chans"] = shape[-1]
        try:
            model: torch.nn.Module = timm.create_model(name, **{**sizes, **options})
        except (TypeError, RuntimeError) as error:
            if type(error) not in (TypeError, RuntimeError):  # an unknown option; a name, or a tag of weights, that is not known
                raise
            raise UserError(
                f"timm does not make {short(name)}: {error}", where, "options of the model's class and of timm.create_model()"
            ) from error
        return model

    return make


def _load(where: str) -> Any:
    import_torchvision()  # timm imports it, and would stop beside a CPU build of torch
    try:
        import timm
    except ModuleNotFoundError as error:
        raise UserError(f"{error}", where, "pip install timm") from None
    return timm
