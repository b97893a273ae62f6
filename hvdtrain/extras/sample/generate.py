"""Draws tokens with generate() of transformers, where the caller chooses each token."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

Draw = Callable[[torch.Tensor, int], torch.Tensor]  # logits (n, outputs), position -> int64 (n,)


def generate(
    model: Any, prompts: torch.Tensor, length: int, draw: Draw, ends: Sequence[int]
) -> torch.Tensor:
    """Returns the prompts, int64 (n, m), continued to at most `length` tokens. It is shorter if all
    sequences have one of the tokens `ends`; a sequence repeats it to the end of the longest."""
    transformers: Any = sys.modules["transformers"]
    end = torch.tensor(ends, dtype=torch.int64, device=prompts.device)

    def scores(sequences: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Leaves the drawn token as the only possible one: the library then takes it."""
        chosen = draw(logits, sequences.shape[1])
        last = sequences[:, -1]
        # a prompt may contain such tokens
        if len(end) and sequences.shape[1] > prompts.shape[1]:
            chosen = torch.where(torch.isin(last, end), last, chosen)
        return torch.full_like(logits, -torch.inf).scatter(1, chosen[:, None], 0.0)

    def is_done(sequences: torch.Tensor, _: Any, **options: Any) -> torch.Tensor:
        """Whether each sequence has ended, bool (n,)."""
        if not len(end) or sequences.shape[1] == prompts.shape[1]:
            return torch.zeros(len(sequences), dtype=torch.bool, device=sequences.device)
        done: torch.Tensor = torch.isin(sequences[:, -1], end).all().expand(len(sequences))
        return done

    options = transformers.GenerationConfig(
        do_sample=False, use_cache=True, max_length=length, pad_token_id=0
    )
    of_model = model.generation_config
    # what `options` leaves open would come from here: ends, penalties, beams
    model.generation_config = transformers.GenerationConfig()
    try:
        found: torch.Tensor = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            generation_config=options,
            logits_processor=[scores],
            stopping_criteria=[is_done],
        )
    finally:
        model.generation_config = of_model
    return found


def end_tokens(model: Any) -> tuple[int, ...]:
    """Returns the tokens that end a text, as the model's configuration says."""
    configured = getattr(model, "generation_config", None)
    ends = getattr(configured, "eos_token_id", None)
    return tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)


def longest(model: Any) -> int | None:
    """Returns the most tokens of a text that the model draws: one more than it has positions. None
    if it is not limited."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    return None if positions is None else positions + 1
