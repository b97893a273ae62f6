"""Checks that a model of transformers keeps the sequences of a packed row apart."""

from __future__ import annotations

import torch

from hvdtrain.data.packed import SEGMENTS, TOKENS
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.call import call
from hvdtrain.frameworks.torch.forward import first_of
from hvdtrain.tasks.task import Task

_LENGTHS = (5, 7)  # tokens of the two sequences of a row that is tried
_ROWS = 2  # flash attention of transformers keeps sequences apart only in a batch of one row
# differences from rounding, relative to the largest output. Some models round to float32 inside.
_SAME_SHAPES = 4 * torch.finfo(torch.float32).eps
_OTHER_SHAPES = 1e-3


def check_packing(model: torch.nn.Module, task: Task, device: torch.device, where: str) -> None:
    """Raises UserError if the outputs for the second of two sequences in a row depend on the first,
    or are not those for that sequence alone. Tries a batch of two rows.

    The library finds the sequences by their position_ids, which begin again at 0. Models with
    states or convolutions, and those that count positions themselves, do not.
    """
    context: int = task.sizes["context"]
    vocabulary: int = task.sizes["vocabulary"]
    if context < 2:
        return
    first, second = (max(1, min(length, context * length // sum(_LENGTHS))) for length in _LENGTHS)
    at = torch.arange(first + second, device=device)
    rows = torch.arange(_ROWS, device=device)[:, None]
    tokens = (7 * at * at + 3 * at + 1 + 2 * rows) % vocabulary  # (n, T)
    is_second = (at >= first).expand(_ROWS, -1)
    segments = 1 + is_second.long()

    def outputs(tokens: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = first_of(call(model, {TOKENS: tokens, SEGMENTS: segments}))
        return found[:, -second:]

    with torch.no_grad():
        model.eval()
        packed = outputs(tokens, segments)
        after_others = outputs(torch.where(is_second, tokens, (tokens + 1) % vocabulary), segments)
        alone = outputs(tokens[:, first:], segments[:, first:])
    scale = alone.abs().max().item()
    coarser = max(1.0, torch.finfo(alone.dtype).eps / torch.finfo(torch.float32).eps)
    apart = (packed - after_others).abs().max().item()
    why = "the tokens of a sequence change the outputs for the next one in its row"
    if apart <= scale * coarser * _SAME_SHAPES:
        apart = (packed - alone).abs().max().item()
        why = "the outputs for a sequence depend on where it is in its row"
        if apart <= scale * min(0.1, coarser * _OTHER_SHAPES):
            return
    raise cannot_pack(model, f"{why}, by {apart:.2g} of {scale:.2g}", where)


def cannot_pack(model: torch.nn.Module, why: str, where: str) -> UserError:
    """Returns the error for a model that does not support data.pack."""
    return UserError(
        f"data.pack does not support {type(model).__name__} of transformers: {why}",
        where,
        "data.pad={tokens: 0} instead of data.pack",
    )
