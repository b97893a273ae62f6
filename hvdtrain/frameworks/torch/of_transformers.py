"""What models of transformers need for training: no cache of past keys, the token of padding."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch


def without_past(model: torch.nn.Module) -> None:
    """Turns off the cache of past keys and values in the Transformers models inside `model`: it
    does not consist of tensors, and training does not need it."""
    transformers: Any = sys.modules.get("transformers")
    for module in model.modules() if transformers is not None else ():
        if isinstance(module, transformers.PreTrainedModel) and hasattr(module.config, "use_cache"):
            module.config.use_cache = False


def pool_before(model: torch.nn.Module, padding: int) -> None:
    """Makes classifiers that use the outputs of a row's last real token know the
    token of padding; the model keeps lines for the header."""
    transformers: Any = sys.modules.get("transformers")
    for module in model.modules() if transformers is not None else ():
        if not isinstance(module, transformers.PreTrainedModel) or not _pools(type(module)):
            continue
        config: Any = module.config.get_text_config()
        if config.pad_token_id != padding:
            module.lines_of_padding = (
                f"pad_token_id of {type(module).__name__} is {padding}, the token of padding, "
                f"instead of {config.pad_token_id}: the last other token of a row is classified",
            )
            config.pad_token_id = padding


def _pools(kind: type[Any]) -> bool:
    """Whether forward() of a class reads pad_token_id. Others take padding from the mask, and may
    count positions from pad_token_id, as RoBERTa does."""
    return any(
        "pad_token_id" in inspect.unwrap(vars(one)["forward"]).__code__.co_names
        for one in kind.__mro__
        if one.__name__.endswith("ForSequenceClassification") and "forward" in vars(one)
    )
