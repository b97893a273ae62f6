"""model.name=timm:NAME: a timm model, created for the inputs and outputs of the task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvdtrain.core.arrays import Readable
from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.errors import UserError, nearest, short

# OWNER/NAME of the Hugging Face Hub; local-dir:FOLDER is not followed
_HUB = (
    "hf-hub:",
    "hf_hub:",
)
# options of timm.create_model()
_FILES = (
    "checkpoint_path",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
)


def model_of(name: str, where: str) -> Callable[..., torch.nn.Module]:
    """Returns a function that creates the model. Raises UserError if timm is not installed or has
    no such model.

    Its options are passed to timm.create_model() and the model's class; in_chans and num_classes
    default to the task's.
    """
    timm = _load(where)
    if not name.startswith(_HUB) and (
        ":" in name or not timm.is_model(name.partition(".")[0])
    ):  # a hub's model is read when it is created
        fix = (
            "model.name=timm:NAME model.weights=FOLDER/model.safetensors"
            if ":" in name
            else nearest(name, timm.list_models())
        )
        raise UserError(f"timm has no model {short(name)}", where, fix)

    def make(
        outputs: int | None = None, shape: Sequence[int] = (), **options: Any
    ) -> torch.nn.Module:
        sizes = {"num_classes": outputs} if outputs else {}
        if len(shape) == 3:
            sizes["in_chans"] = shape[-1]
        if found := next((option for option in _FILES if options.get(option)), None):
            raise UserError(
                f"model.{found}={short(str(options[found]))} names files or addresses",
                where,
                "model.weights=FILE",
            )
        try:
            model: torch.nn.Module = timm.create_model(name, **{**sizes, **options})
        except (TypeError, RuntimeError) as error:
            if type(error) not in (
                TypeError,
                RuntimeError,
            ):  # an unknown option; a name, or a tag of weights, that is not known
                raise
            raise UserError(
                f"timm cannot create {short(name)}: {error}",
                where,
                "options of the model's class and of timm.create_model()",
            ) from error
        return model

    return make


def in_names_of(model: torch.nn.Module, found: Mapping[str, Readable]) -> None:
    """Returns None: a file of timm has the names of its model."""


def _load(where: str) -> Any:
    import_torchvision()  # timm imports it, which would fail beside a CPU build of torch
    try:
        import timm
    except ModuleNotFoundError as error:
        raise UserError(f"{error}", where, "pip install timm") from None
    return timm
