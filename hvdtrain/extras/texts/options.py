"""The options that all data sets of texts have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.data.option_error import OptionError


@dataclass(frozen=True)
class TextOptions:
    """Which fields of a record are read, and how they become tokens."""

    text: str | None = None  # the field with the text; None: a chat
    messages: str | None = None  # the field with the messages of a chat
    target: str | None = None  # the field y; None: a language model predicts the tokens
    tokenizer: Path | None = None  # a file or a folder; None: bytes
    context: int | None = None  # most tokens that the model reads
    special_tokens: bool = True
    pad_token: str | None = None

    def check_table(self, others: Mapping[str, object]) -> None:
        """Raises UserError for options of a table's texts without a text, and for others, of tables
        of numbers, beside them."""
        if self.text is None and self.messages is None:
            own = {
                "target": self.target is not None,
                "tokenizer": self.tokenizer is not None,
                "context": self.context is not None,
                "pad_token": self.pad_token is not None,
                "special_tokens": not self.special_tokens,
            }
            alone = next(option for option, is_set in own.items() if is_set)
            raise OptionError(
                f"data.{alone} needs data.text: other columns of a table are numbers",
                alone,
                "data.text=COLUMN, or leave it out",
            )
        if wrong := next((option for option, value in others.items() if value), None):
            raise OptionError(
                f"data.{wrong} is for columns of numbers, but data.text or data.messages reads "
                "texts",
                wrong,
                "leave it out",
            )

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a record that are read."""
        return tuple(name for name in (self.text, self.messages, self.target) if name is not None)

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of a document: a language model predicts one more than it reads."""
        return self.context and self.context + (self.target is None)


def text_options(
    name: str,
    text: str | None,
    messages: str | None,
    target: str | None,
    tokenizer: Path | None,
    context: int | None,
    special_tokens: bool,
    pad_token: str | None,
) -> TextOptions:
    """Returns the options. Raises UserError if they contradict each other."""
    if text is not None and messages is not None:
        raise OptionError(
            f"data.text={text} and data.messages={messages} both name what is read",
            "messages",
            "one of them",
        )
    if messages is not None and target is not None:
        raise OptionError(
            f"data.target={target} needs data.text: a chat of data.messages has no label",
            "target",
            "leave data.target out, or data.text=FIELD",
        )
    if messages is not None and tokenizer is None:
        raise OptionError(
            "data.messages needs the chat template of a tokenizer",
            "messages",
            "data.tokenizer=FOLDER, as tokenizer.save_pretrained(FOLDER) writes it",
        )
    if context is not None and not 1 <= context <= 2**20:
        raise OptionError(f"a context of {context} tokens is impossible", "context", "1 to 1048576")
    fields = [field for field in (text, messages, target) if field is not None]
    if len(set(fields)) < len(fields):
        raise OptionError(
            f"data.text and data.target of data.name={name} name the same field, {target}",
            "target",
            "another field",
        )
    return TextOptions(text, messages, target, tokenizer, context, special_tokens, pad_token)
