"""A chat template of transformers: the text of a conversation, and where the assistant's answers
are in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes, sandbox
from jinja2.ext import Extension
from jinja2.parser import Parser

from hvdtrain.errors import BUG, UserError, exit_code_of, first_line

_LEAST_VERSION = (3, 1, 6)  # older versions can be made to run code that a template contains
# Unicode has no such characters: they mark the answers in the rendered text, and are removed
_BEGIN = "\ufdd0"
_END = "\ufdd1"
_MARKS = (_BEGIN, _END)
_GENERATION = re.compile(r"\{%-?\+?\s*generation\b")
Message = dict[str, Any]  # role, content, and what else the template uses


class Rendered(NamedTuple):
    """The text of a conversation, and the first and last character + 1 of each answer in it."""

    text: str
    answers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template. It runs in jinja2's sandbox, and cannot change what it gets."""

    render: Callable[..., str]  # of jinja2
    special_tokens: Mapping[str, str]
    marks_answers: bool  # with {% generation %}
    where: str  # its folder, for messages

    def rendered(self, messages: Sequence[Message], where: str) -> Rendered:
        """Renders a conversation of one message or more, with the answers that the template marks.
        Raises UserError if it fails. where: of the conversation, for messages."""
        marked = self._text(messages, where)
        if not self.marks_answers:
            return Rendered(marked, ())
        if any(mark in str(message.get("content")) for message in messages for mark in _MARKS):
            raise UserError(
                "a message has U+FDD0 or U+FDD1, which are not characters", where, "remove them"
            )
        return _without_marks(marked)

    def with_answers(self, messages: Sequence[Message], where: str) -> Rendered:
        """Renders a conversation, and finds its answers also if the template does not mark them.
        Raises UserError as rendered() does, and if the template does not show where they are."""
        found = self.rendered(messages, where)
        if self.marks_answers:
            return found
        return Rendered(found.text, tuple(self._answers(messages, found.text, where)))

    def prompt(self, messages: Sequence[Message], where: str) -> str:
        """Renders a conversation up to where the answer begins. Raises UserError if it fails."""
        return self._text(messages, where, is_prompt=True)

    def _answers(self, messages: Sequence[Message], text: str, where: str) -> list[tuple[int, int]]:
        """Returns the answers in a text by rendering the beginnings of the conversation: an answer
        is what follows the prompt for it, without blanks at its end, which are the template's.

        Raises UserError if the text of a beginning is not a beginning of the text.
        """
        found = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._beginning(messages[:number], text, number, True, where)
            until = self._beginning(messages[: number + 1], text, number, False, where)
            found.append((len(prompt), len(until.rstrip())))
        return found

    def _beginning(
        self, messages: Sequence[Message], text: str, number: int, is_prompt: bool, where: str
    ) -> str:
        beginning = self._text(messages, where, is_prompt)
        if text.startswith(beginning):
            return beginning
        at = next(i for i in range(len(beginning)) if not text.startswith(beginning[: i + 1]))
        other = (
            "without the messages after it"
            if not is_prompt
            else "as the prompt for it (add_generation_prompt)"
        )
        raise UserError(
            f"the chat template renders message {number} differently {other}, from character {at} "
            f"on ({beginning[at : at + 20]!r}, {text[at : at + 20]!r} in the conversation), so it "
            "does not show where the answer is",
            where,
            f"in the template of {self.where}, {{% generation %}} and {{% endgeneration %}} around "
            "each answer; or the loss on all tokens",
        )

    def _text(self, messages: Sequence[Message], where: str, is_prompt: bool = False) -> str:
        try:
            return self.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=is_prompt,
                **self.special_tokens,
            )
        except Exception as error:
            if exit_code_of(error) != BUG:
                raise
            fix = f"a conversation of the form that the template of {self.where} expects"
            if "strftime_now" in str(error):
                fix = f"in the template of {self.where}, a date: tokens would depend on the day"
            raise UserError(f"the chat template fails: {first_line(error)}", where, fix) from None


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: the text between is an answer."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _without_marks(marked: str) -> Rendered:
    text, *parts = marked.split(_BEGIN)
    answers = []
    for part in parts:
        answer, _, rest = part.partition(_END)
        answers.append((len(text), len(text) + len(answer)))
        text += answer + rest
    return Rendered(text, tuple(answers))


def compiled(template: str, special_tokens: Mapping[str, str], where: str) -> ChatTemplate:
    """Compiles a template as transformers does, except that it cannot ask for today's date: the
    tokens of a run would depend on the day.

    Raises UserError if it is not a template.
    """
    version = tuple(int(part) for part in re.findall(r"\d+", jinja2.__version__)[:3])
    if version < _LEAST_VERSION:
        raise UserError(
            f"jinja2 {jinja2.__version__} does not shut in the code of a chat template",
            where,
            "pip install 'jinja2>=3.1.6'",
        )
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    try:
        made = environment.from_string(template)
    except (jinja2.TemplateError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise UserError(
            f"the chat template{line}: {first_line(error)}", where, "restore it from a copy"
        ) from None
    return ChatTemplate(
        made.render, special_tokens, _GENERATION.search(template) is not None, where
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON without the escapes that HTML needs, which jinja2's own filter adds."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
