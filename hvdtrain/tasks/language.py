"""Prediction of the next token at each position of a window: nats per token, perplexity, bits per
token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.metrics import Metric, Sums, ratio
from hvdtrain.data.field import Field, field_of_facts
from hvdtrain.data.packed import ANSWERS, SEGMENTS, answer_fields, is_packed, segment_fields
from hvdtrain.data.ragged import padded_fields
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.tasks.rows import Rows, rows_of_tokens
from hvdtrain.tasks.task import DeviceAndDtype, Task, TaskPart, find_field

_MOST = 2**26  # limit for the tokens of a window and of a vocabulary
_nats = ratio("loss", "tokens")


def _perplexity(sums: Sums) -> float:
    """Returns exp(nats per token), or infinity if that overflows float64."""
    if (nats := _nats(sums)) < 700:
        return math.exp(nats)
    if math.isnan(nats):
        return nats
    return math.inf


@dataclass(frozen=True)
class Language(Task):
    """Prediction of the next token: in a window of T + 1 tokens, the first T are inputs and the
    last T are targets, except tokens equal to `ignore`."""

    tokens: Field  # (T + 1,), values: the vocabulary; with padding, T + 1 is the maximum length
    ignore: int | None = None
    # windows contain several sequences, marked by segments; none is predicted from another
    packed: bool = False
    of_answers: bool = False  # only tokens of the assistant's answers are predicted

    name = "language"
    metrics = (
        Metric("loss", _nats, "min"),
        Metric("perplexity", _perplexity, "min", column="ppl"),
        Metric("bits", lambda sums: _nats(sums) / math.log(2), "min"),
    )
    objective = "loss"
    sums = MappingProxyType({"loss": 0, "tokens": 0})
    takes_lengths = True
    takes_split_logits = True

    @property
    def fields(self) -> dict[str, Field]:
        padding = self.tokens.padding
        answers = answer_fields(self.tokens) if self.of_answers else {}
        if self.packed:
            return {**segment_fields(self.tokens), **answers}
        if padding is None:
            return {"tokens": self.tokens, **answers}
        return {**padded_fields("tokens", self.tokens, padding), **answers}

    @property
    def drawn(self) -> Field:
        return self.tokens

    def rows(self, is_softmax: bool, class_names: Sequence[str] | None) -> Rows:
        return rows_of_tokens()

    @property
    def mask(self) -> str | None:
        """The name of the mask field that marks real tokens, if they are padded."""
        return None if self.tokens.padding is None else self.tokens.padding.mask

    @property
    def context(self) -> int:
        """T"""
        return self.tokens.shape[0] - 1

    @property
    def sizes(self) -> dict[str, Any]:
        return {"context": self.context, "vocabulary": self.tokens.values}

    @property
    def summary(self) -> str:
        padding = "" if self.ignore is None else f", token {self.ignore} is padding"
        padding += ", the loss is of the assistant's answers" if self.of_answers else ""
        if self.packed:
            return (
                f"packed rows of {self.context + 1:,} tokens below {self.tokens.values:,}{padding}"
            )
        windows = "windows of" if self.mask is None else "sequences of at most"
        return f"{windows} {self.context:,} tokens below {self.tokens.values:,}{padding}"

    @property
    def sample_weight(self) -> int | None:
        is_every_token = self.ignore is None and self.mask is None
        return self.context if is_every_token and not (self.packed or self.of_answers) else None

    def weight(self, batch: Batch) -> int:
        """Returns the number of tokens that are predicted."""
        targets = batch["tokens"][:, 1:]
        counts = np.ones(targets.shape, bool) if self.mask is None else batch[self.mask][:, 1:]
        if self.packed:
            segments = batch[SEGMENTS]
            counts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
        if self.of_answers:
            counts = counts & batch[ANSWERS][:, 1:]
        return int(
            np.count_nonzero(counts if self.ignore is None else counts & (targets != self.ignore))
        )

    def facts(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens.facts(),
            "ignore": self.ignore,
            **({"packed": True} if self.packed else {}),
            **({"loss_on": "assistant"} if self.of_answers else {}),
        }

    def outputs(self, samples: int) -> str:
        return f"logits {(samples, self.context, self.tokens.values)}"

    def fits(self, found: tuple[int, ...], samples: int) -> bool:
        """Whether the outputs fit; a model may have more outputs than the vocabulary."""
        return (
            len(found) == 3
            and found[:2] == (samples, self.context)
            and found[2] >= self.tokens.values
        )

    def torch(self, model: ModelConfig, place: DeviceAndDtype) -> TaskPart:
        from hvdtrain.tasks.torch import TorchLanguage

        return TorchLanguage(
            self.ignore, model.label_smoothing, self.mask, self.packed, self.of_answers
        )

    def jax(self, model: ModelConfig, place: DeviceAndDtype) -> TaskPart:
        return place.parts.JaxLanguage(self.ignore, model.label_smoothing)


def build(
    name: str,
    train: Source,
    val: Source,
    where: str,
    users_model: bool = False,
    *,
    ignore: int | None = None,
    loss_on: Literal["all", "assistant"] = "all",
) -> Language:
    """Builds the task of predicting tokens in windows; model.label_smoothing applies.

    ignore: token that is not predicted, for example padding
    loss_on: all: every token is predicted; assistant: only the tokens of the assistant's answers in
        the chats of data.messages

    Raises UserError if the data have no tokens, or if the sets do not match.
    """
    fields = [
        find_field(source, "tokens", name, where, "integers (T + 1,) below a vocabulary")
        for source in (train, val)
    ]
    for field in fields:
        if (
            len(field.shape) != 1
            or field.shape[0] < 2
            or not field.values
            or np.dtype(field.dtype).kind not in "iu"
        ):
            raise UserError(
                f"tokens are {field}",
                where,
                "a row of 2 or more integers for each sample",
            )
    if fields[0].shape != fields[1].shape:
        what = (
            f"training windows have {fields[0].shape[0]} tokens, validation windows "
            f"{fields[1].shape[0]}"
        )
        raise UserError(what, where, "both sets need windows of the same length")
    for source, which in ((train, "training"), (val, "validation")):
        lengths = source.known_lengths("tokens")
        if lengths is not None and lengths.max(initial=0) < 2:
            raise UserError(
                f"no {which} sequence has two tokens, so there is nothing to predict",
                where,
                "sequences of two tokens or more",
            )
    if loss_on == "assistant":
        for source in (train, val):
            if ANSWERS not in source.fields:
                raise UserError(
                    "task.loss_on=assistant needs chats, whose answers are known; the data have "
                    f"{', '.join(source.fields)}",
                    "task.loss_on",
                    "data.messages=FIELD of data.name=jsonl, or task.loss_on=all",
                )
    vocabulary = max(field.values for field in fields)
    if ignore is not None and not 0 <= ignore < vocabulary:
        raise UserError(
            f"task.ignore={ignore} is not a token: tokens are 0 to {vocabulary - 1}",
            where,
            "one of them, or leave it out",
        )
    # with padded sequences, both sets have the same maximum length
    tokens = fields[0]._replace(values=vocabulary)
    return Language(tokens, ignore, is_packed(train.fields), loss_on == "assistant")


def restore(facts: dict[str, Any]) -> Language:
    """Rebuilds the task from Language.facts(). Raises KeyError, TypeError, ValueError or
    OverflowError if facts are missing or invalid."""
    tokens = field_of_facts(facts["tokens"])
    ignore = facts["ignore"]
    (length,), vocabulary = tokens.shape, tokens.values
    if not all(type(size) is int and 1 <= size <= _MOST for size in (length - 1, vocabulary)):
        raise ValueError("impossible windows or vocabulary")
    if not (ignore is None or (type(ignore) is int and 0 <= ignore < vocabulary)):
        raise ValueError("impossible ignore")
    of_answers = facts.get("loss_on") == "assistant"
    return Language(tokens, ignore, facts.get("packed") is True, of_answers)
