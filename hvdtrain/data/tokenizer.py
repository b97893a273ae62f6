"""Tokenizer: reads a tokenizer.json of the tokenizers package. Every mistake in it raises
UserError."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hvdtrain.core.arrays import digest
from hvdtrain.core.folder import check_regular
from hvdtrain.errors import BUG, UserError, exit_code_of, first_line, short

FILE = "tokenizer.json"
_MOST_BYTES = 2**28  # of the file
_MOST_VOCABULARY = 2**24  # tokens; a model has a row for each
_MOST_GROWTH = 2**12  # factor by which the file's replacements may lengthen a text
_FIX = "restore the file from a copy"
# the library's errors for a word without a token if there is no unknown token
_NO_UNKNOWN = re.compile(r"Missing .* token|Unk token .* not found|`unk_id` is missing")

T = TypeVar("T")


@dataclass(frozen=True)
class Tokenizer:
    """Converts strings to numbers below `vocabulary`, and back."""

    path: Path
    of_library: Any  # tokenizers.Tokenizer
    vocabulary: int  # the largest token plus 1

    @property
    def digest(self) -> str:
        """Returns the digest of all tokens with their numbers. It does not depend on the formatting
        of the file."""
        tokens = json.dumps(sorted(self.of_library.get_vocab(True).items()))
        return digest({"tokens": np.frombuffer(tokens.encode(), np.uint8)})

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text. Raises UserError if the tokenizer fails, for example for an
        unknown word."""
        tokens: list[int] = self.encoding(text).ids
        return tokens

    def encoding(self, text: str) -> Any:
        """Returns the tokenizers.Encoding of a text, without special tokens: its tokens, and the
        characters of each. Raises UserError as encode() does."""
        try:
            found = _called(
                lambda: self.of_library.encode(text, add_special_tokens=False),
                "does not read the text",
                self.path,
            )
        except UserError as error:
            if _NO_UNKNOWN.search(error.what) is None:
                raise
            raise self._unknown(text) from None
        self._check(text, found.ids)
        return found

    def with_special_tokens(self, encoding: Any, most: int | None = None) -> Any:
        """Returns an encoding with the special tokens that the file adds to a text, such as [CLS]
        and [SEP], cut at its end to `most` tokens in all."""
        if most is not None:
            encoding.truncate(max(0, most - self.of_library.num_special_tokens_to_add(False)))
        found = _called(
            lambda: self.of_library.post_process(encoding, None, True),
            "adds no special tokens",
            self.path,
        )
        self._check("", found.ids)
        return found

    @property
    def special_tokens(self) -> int:
        """How many special tokens the file adds to a text."""
        return int(self.of_library.num_special_tokens_to_add(False))

    def number(self, token: str) -> int | None:
        """Returns the number of a token; None if it has no such token."""
        number: int | None = self.of_library.token_to_id(token)
        return number

    def _check(self, text: str, tokens: list[int]) -> None:
        """Raises UserError if a word of the text was dropped, or for a token that is not in the
        vocabulary."""
        if self._may_drop and (dropped := self._dropped(text, tokens)):
            raise self._unknown(dropped)
        if max(tokens, default=0) >= self.vocabulary:
            raise UserError(
                f"the tokenizer returned token {max(tokens)}, but its vocabulary has only "
                f"{self.vocabulary}",
                str(self.path),
                _FIX,
            )

    @cached_property
    def _may_drop(self) -> bool:
        """Whether the library silently drops characters that the model lacks: of BPE without an
        unknown token, unless each byte has a token, as in GPT-2."""
        from tokenizers.pre_tokenizers import ByteLevel

        library = self.of_library
        model = library.model
        if type(model).__name__ != "BPE" or model.unk_token is not None or model.byte_fallback:
            return False
        has_affixes = model.continuing_subword_prefix or model.end_of_word_suffix
        is_of_bytes = "ByteLevel" in str(library.pre_tokenizer) and not has_affixes
        known = set(library.get_vocab(with_added_tokens=False))
        return not (is_of_bytes and known.issuperset(ByteLevel.alphabet()))

    def _dropped(self, text: str, found: Sequence[int]) -> str:
        """Finds a word with a character that the library silently drops because a BPE model lacks
        it and has no unknown token. found: the tokens of the text.

        Returns an empty string if there is none, and if these words do not have the tokens that
        were found.
        """
        library = self.of_library
        model = library.model
        known = set(library.get_vocab(with_added_tokens=False))
        first = model.continuing_subword_prefix or ""
        last = model.end_of_word_suffix or ""
        words = list(self._words(text))
        unsure = [
            word
            for word in dict.fromkeys(word for word in words if isinstance(word, str))
            if not known.issuperset(_letters(word, first, last))
        ]
        # if a character was dropped, the library's tokens end before the word does
        dropped = next((word for word in unsure if _end(model.tokenize(word)) < _bytes(word)), "")
        if not dropped:
            return ""
        numbers = {
            word: [token.id for token in model.tokenize(word)]
            for word in dict.fromkeys(words)
            if isinstance(word, str)
        }
        expected = [
            number
            for word in words
            for number in (numbers[word] if isinstance(word, str) else [word])
        ]
        return dropped if expected == list(found) else ""

    def _words(self, text: str) -> Iterator[str | int]:
        """Yields the words of a text as the model gets them, and the numbers of added tokens
        between them. The library finds added tokens before the normalizer, or after it if they are
        normalized."""
        library = self.of_library
        added = library.get_added_tokens_decoder()
        normalize = library.normalizer.normalize_str if library.normalizer is not None else str
        plain = _Added({n: (one, one.content) for n, one in added.items() if not one.normalized})
        normalized = _Added(
            {n: (one, normalize(one.content)) for n, one in added.items() if one.normalized}
        )
        for part in plain.cut(text):
            if isinstance(part, int):
                yield part
                continue
            for piece in normalized.cut(normalize(part)):
                if isinstance(piece, int) or library.pre_tokenizer is None:
                    yield piece
                else:
                    yield from (word for word, _ in library.pre_tokenizer.pre_tokenize_str(piece))

    def _unknown(self, text: str) -> UserError:
        """Returns the error for a string without tokens; it names the first such word."""
        word = next((word for word in text.split() if not self._has(word)), text)
        return UserError(
            f"the tokenizer has no tokens for {short(repr(word), 40)}, and no unknown token to "
            "replace it",
            str(self.path),
            "train it on this text, with unk_token='[UNK]' in the model and '[UNK]' in the "
            "special_tokens of its trainer; or a byte-level tokenizer; or data.tokenizer=null: "
            "each byte is a token",
        )

    def _has(self, word: str) -> bool:
        try:
            _called(lambda: self.of_library.encode(word), "", self.path)
        except UserError:
            return False
        return True

    def decode(self, numbers: Sequence[int]) -> str:
        """Returns the text of tokens. Raises UserError if the tokenizer fails."""
        return str(
            _called(
                lambda: self.of_library.decode(numbers), "makes no text of its numbers", self.path
            )
        )


class _Added:
    """Added tokens that divide a string; the longest one wins if several match."""

    def __init__(self, tokens: Mapping[int, tuple[Any, str]]) -> None:
        """tokens: number -> tokenizers.AddedToken, and its content in the text."""
        self._tokens = sorted(
            ((content, number, token) for number, (token, content) in tokens.items() if content),
            key=lambda each: -len(each[0]),
        )

    def cut(self, text: str) -> Iterator[str | int]:
        """Returns the parts of a string between added tokens, without empty ones, and the tokens'
        numbers."""
        present = [each for each in self._tokens if each[0] in text]
        end = 0
        if present:
            pattern = "|".join(_pattern(content, token) for content, _, token in present)
            for match in re.finditer(pattern, text):
                if match.start() > end:
                    yield text[end : match.start()]
                yield next(number for content, number, _ in present if content in match[0])
                end = match.end()
        if end < len(text):
            yield text[end:]


def _pattern(content: str, token: Any) -> str:
    """Returns the pattern of an added token: with the spaces that it strips, and only for whole
    words if the token requires that."""
    left = r"\s*" * token.lstrip + r"(?<!\w)" * token.single_word
    right = r"(?!\w)" * token.single_word + r"\s*" * token.rstrip
    return left + re.escape(content) + right


def _letters(word: str, first: str, last: str) -> set[str]:
    """Returns the tokens that BPE starts from: single letters. All except the first have a prefix,
    and the last has a suffix."""
    ends = {word[:1], first + word[-1:] + last} if len(word) > 1 else {word + last}
    return ends | {first + letter for letter in set(word[1:-1])}


def _end(tokens: Sequence[Any]) -> int:
    """Returns the number of bytes of a word that its tokens cover."""
    return int(tokens[-1].offsets[1]) if tokens else 0


def _bytes(word: str) -> int:
    return len(word.encode())


def read_tokenizer(path: Path, notes: list[str] | None = None) -> Tokenizer:
    """Reads a tokenizer.json, or the one in a folder, without truncation and padding; appends to
    `notes` if the file requests these, or if its numbers have gaps.

    Raises UserError if the package is missing, or the file is absent, damaged, or would make a
    text far longer.
    """
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            "data.tokenizer needs the tokenizers package",
            str(path),
            "pip install 'hvdtrain[tokenizers]'",
        ) from None
    notes = [] if notes is None else notes
    path = path / FILE if path.is_dir() else path
    _check_file(path)
    found = _called(
        lambda: tokenizers.Tokenizer.from_file(str(path)), "is damaged or of another kind", path
    )
    _check_added_tokens(found, path)
    if asked := [
        word
        for word, is_asked in (("truncation", found.truncation), ("padding", found.padding))
        if is_asked
    ]:
        found.no_truncation()
        found.no_padding()
        notes.append(
            f"{path.name} asks for {' and '.join(asked)}, which a text has no use for: every "
            "token of it is read, and no other"
        )
    if getattr(found.model, "dropout", None):
        found.model.dropout = None
        notes.append(
            f"{path.name} asks for dropout of merges, which draws other tokens in each process: "
            "none is dropped"
        )
    numbers = set(found.get_vocab(with_added_tokens=True).values())
    vocabulary = 1 + max(numbers, default=0)
    if vocabulary > _MOST_VOCABULARY:
        raise UserError(
            f"the tokenizer has token number {vocabulary - 1}; the largest supported one is "
            f"{_MOST_VOCABULARY - 1}",
            str(path),
            _FIX,
        )
    if len(numbers) < vocabulary:
        notes.append(
            f"{path.name} has {len(numbers)} tokens with numbers up to {vocabulary - 1}: the "
            f"model gets {vocabulary}, with gaps"
        )
    return Tokenizer(path, found, vocabulary)


def _check_added_tokens(of_library: Any, path: Path) -> None:
    """Raises UserError for an added token that the normalizer removes completely: the library
    (0.23) would find it everywhere and use up all memory."""
    if of_library.normalizer is None:
        return
    for token in of_library.get_added_tokens_decoder().values():
        if token.normalized and not of_library.normalizer.normalize_str(token.content):
            content = short(repr(token.content), 40)
            raise UserError(
                f"the normalizer leaves nothing of the added token {content}",
                str(path),
                'remove the token from "added_tokens", or set its "normalized" to false',
            )


def _check_file(path: Path) -> None:
    """Raises UserError for a missing file, or if its strings would use up all memory."""
    try:
        if check_regular(path).st_size > _MOST_BYTES:
            raise UserError(f"more than {_MOST_BYTES} bytes", str(path), "a tokenizer.json")
        growth = math.prod(_growths(json.loads(path.read_bytes())))
    except FileNotFoundError:
        raise UserError(
            "no such file",
            str(path),
            "data.tokenizer=FILE, a tokenizer.json, or the folder that has it; transformers' "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes one",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"the tokenizer is damaged or of another kind: {first_line(error)}", str(path), _FIX
        ) from None
    if growth > _MOST_GROWTH:
        raise UserError(
            f"the tokenizer's replacements make a text {growth} times as long", str(path), _FIX
        )


def _growths(tree: Any) -> list[int]:
    """Returns the factors by which the file's replacements may lengthen a string."""
    if isinstance(tree, list):
        return [growth for inner in tree for growth in _growths(inner)]
    if not isinstance(tree, dict):
        return []
    longer = {"Replace": tree.get("content"), "Prepend": tree.get("prepend")}.get(
        str(tree.get("type"))
    )
    parts = [
        inner
        for key, inner in tree.items()
        if key in ("normalizer", "normalizers", "decoder", "decoders")
    ]
    return [*([max(1, len(longer))] if isinstance(longer, str) else []), *_growths(parts)]


def _called(work: Callable[[], T], what: str, path: Path) -> T:
    """Returns the result of work(). Raises UserError if the library fails: it raises plain
    Exception, or, for its own bugs, something that is not an Exception."""
    try:
        return work()
    except BaseException as error:
        is_of_library = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not is_of_library or exit_code_of(error) != BUG:
            raise
        raise UserError(
            f"the tokenizer {what}: {str(error).partition(chr(10))[0]:.200}", str(path), _FIX
        ) from None
