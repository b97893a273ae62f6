"""The fields of packed rows: several variable-length sequences in one row of tokens (data.pack,
which an extra implements), and of chats."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.data.field import Field, Padding

TOKENS = "tokens"
SEGMENTS = "segments"
ANSWERS = "answers"  # bool, of chats: which tokens belong to an answer of the assistant
# padding of the sequences before they are packed
PADDING: Mapping[str, Padding] = {TOKENS: Padding(0, "real_tokens")}


def is_packed(fields: Mapping[str, Field]) -> bool:
    """Whether the fields are from PackedRows, whose segments mark the real tokens and the sequence
    of each token."""
    return SEGMENTS in fields and fields[SEGMENTS].is_mask and fields[SEGMENTS].dtype == "int64"


def segment_fields(tokens: Field) -> dict[str, Field]:
    """Returns the fields of packed rows of these tokens."""
    return {TOKENS: tokens, SEGMENTS: Field("int64", tokens.shape[:1], padding=Padding(0, ""))}


def answer_fields(tokens: Field) -> dict[str, Field]:
    """Returns the field that marks the answers among these tokens."""
    return {ANSWERS: Field("bool", tokens.shape[:1], padding=Padding(False, ""))}
