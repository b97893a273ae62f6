"""data.name=text: windows of bytes, of which each but the first is predicted once; tokenizers; and
what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.config.read import configure
from hvdtrain.data.datasets import text
from hvdtrain.data.datasets.text import decode
from hvdtrain.data.tokenizer import read_tokenizer
from hvdtrain.errors import UserError
from hvdtrain.training.datasets import build_source, open_datasets

TEXT = "Grüße, 'tis the one hundredth line.\n" * 20


def words(path: Path, *more: str) -> list[str]:
    return ["data.name=text", "task.name=language", f"data.root={path}", *more]


def test_windows_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(TEXT.encode())
    (tmp_path / "val.txt").write_bytes(b"abcdefghijk")
    train, val, task, _ = open_datasets(configure(None, words(tmp_path, "data.context=5")))
    content = TEXT.encode()
    assert len(train) == (len(content) - 1) // 5 and task.sizes["vocabulary"] == 256
    read = train.read(np.arange(len(train)))["tokens"]
    assert read.dtype == np.int64
    assert read[:, 1:].ravel().tolist() == list(content[1 : 1 + 5 * len(train)])
    assert [bytes(row.tolist()) for row in val.read(np.array([1, 0]))["tokens"]] == [
        b"fghijk",
        b"abcdef",
    ]
    with pytest.raises(IndexError):
        val.read(np.array([2]))
    assert train.identity() != val.identity()


def test_one_file_is_divided(tmp_path: Path) -> None:
    (tmp_path / "book").write_bytes(TEXT.encode())
    path = tmp_path / "book"
    train, val, *_ = open_datasets(
        configure(None, words(path, "data.context=8", "data.val_share=0.25"))
    )
    assert abs(len(val) - (len(train) + len(val)) / 4) <= 1
    with pytest.raises(UserError, match="book is one file, without a validation set"):
        open_datasets(configure(None, words(path)))


def test_bytes_become_text_again() -> None:
    assert decode(np.frombuffer("Grüße".encode(), np.uint8), None) == "Grüße"
    assert decode(np.array([97, 195]), None) == "a\\xc3"


@pytest.mark.parametrize(
    ("content", "more", "what"),
    [
        (b"fine\nline \xff two", [], "byte 10 is not UTF-8"),
        (
            b"short",
            ["data.context=5"],
            "5 tokens are too few: data.context=5 needs at least one more",
        ),
        (b"", [], "0 tokens are too few"),
        (b"some text", ["data.context=0"], "a context of 0 tokens is impossible"),
    ],
)
def test_what_is_refused(content: bytes, more: list[str], what: str, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(content)
    with pytest.raises(UserError, match=what):
        build_source(configure(None, words(tmp_path, *more)), "train")


def test_the_line_of_a_bad_byte_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(b"fine\nline \xff two")
    with pytest.raises(UserError) as caught:
        build_source(configure(None, words(tmp_path)), "train")
    assert f"{tmp_path / 'train.txt'}:2" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the file cannot be read: No such file"):
        build_source(configure(None, words(tmp_path)), "train")
    with pytest.raises(UserError, match="data.name=text needs data.root"):
        build_source(configure(None, ["data.name=text"]), "train")


TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {
        "type": "WordLevel",
        "vocab": {"[UNK]": 0, "to": 1, "be": 2, "or": 3},
        "unk_token": "[UNK]",
    },
}


def test_a_tokenizers_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / "train.txt").write_text("to be or not to be")
    more = [f"data.tokenizer={tmp_path / 'tokenizer.json'}", "data.context=3"]
    source = build_source(configure(None, words(tmp_path, *more)), "train")
    assert source.fields["tokens"].values == 4
    assert source.read(np.array([0]))["tokens"].tolist() == [[1, 2, 3, 0]]


def test_a_tokenizer_that_truncates_and_pads_gives_the_tokens_of_the_text(tmp_path: Path) -> None:
    """As the files of sentence-transformers do; a line of the header says what is not done."""
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "text.txt").write_text(" ".join(TOKENIZER["model"]["vocab"]) * 50)
    (tmp_path / "plain.json").write_text(json.dumps(TOKENIZER))
    changed = tokenizers.Tokenizer.from_file(str(tmp_path / "plain.json"))
    changed.enable_truncation(5)
    changed.enable_padding(length=2000, pad_id=0)
    changed.save(str(tmp_path / "changed.json"))
    plain, found = (
        text.build("text", tmp_path / "text.txt", "train", context=3, tokenizer=tmp_path / name)
        for name in ("plain.json", "changed.json")
    )
    assert isinstance(plain, text.Windows) and isinstance(found, text.Windows)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert len(found.tokens) >= 100 and plain.notes == ()
    (line,) = found.notes
    assert line.startswith("changed.json asks for truncation and padding") and line in found.notes


def changed(**parts: Any) -> dict[str, Any]:
    """TOKENIZER with other parts; those of the model in `model`."""
    return {**TOKENIZER, **parts, "model": {**TOKENIZER["model"], **parts.get("model", {})}}


def replacing(kind: str, **what: Any) -> dict[str, Any]:
    return changed(normalizer={"type": "Sequence", "normalizers": [{"type": kind, **what}] * 3})


DAMAGED = "the tokenizer is damaged"
UNKNOWN = "has no tokens for 'the', and no unknown token to replace it"
BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
WRONG_TOKENIZERS: list[tuple[Any, str]] = [
    (None, "no such file"),
    *(
        (text, DAMAGED)
        for text in (json.dumps(TOKENIZER)[:-30], "", "[]", "3", "[" * 100_000, "\0")
    ),
    *((changed(model={"vocab": {"a": number}}), DAMAGED) for number in (-1, 1.5, "x", None, 2**32)),
    *(
        (changed(model={"vocab": {"a": number}}), f"has token number {number}; the largest")
        for number in (2**24, 2**32 - 1)
    ),
    *((changed(model={"vocab": vocabulary}), UNKNOWN) for vocabulary in ({}, {"zebra": 0})),
    (changed(model={"vocab": {"the": 0}, "unk_token": "none"}), "has no tokens for 'cat', and no"),
    ({**TOKENIZER, "model": {**BPE, "unk_token": "none"}}, UNKNOWN),
    (
        changed(
            normalizer={"type": "Strip", "strip_left": True, "strip_right": True},
            added_tokens=[
                {
                    "id": 9,
                    "content": "  ",
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": True,
                    "special": False,
                }
            ],
        ),
        "the normalizer leaves nothing of the added token '  '",
    ),
    ({**TOKENIZER, "model": BPE}, UNKNOWN),  # the library drops what it does not have
    ({**TOKENIZER, "model": {"type": "Unigram", "vocab": [["a", -1.0]]}}, UNKNOWN),
    (changed(version="9.0"), DAMAGED),
    *(
        ({**TOKENIZER, "model": model}, DAMAGED)
        for model in (None, {"type": "x"}, {**BPE, "merges": [["a", "z"]]}, {**BPE, "dropout": 2.0})
    ),
    (
        changed(
            pre_tokenizer={
                "type": "Split",
                "pattern": {"Regex": "("},
                "behavior": "Isolated",
                "invert": False,
            }
        ),
        DAMAGED,
    ),
    (
        replacing("Replace", pattern={"String": "a"}, content="a" * 100),
        "replacements make a text 1000000 times as long",
    ),
    (replacing("Prepend", prepend="a" * 100), "replacements make a text 1000000 times as long"),
]


@pytest.mark.parametrize(
    ("content", "what"), WRONG_TOKENIZERS, ids=map(str, range(len(WRONG_TOKENIZERS)))
)
def test_a_damaged_tokenizer_is_refused(content: Any, what: str, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("the cat sat on the mat " * 9)
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    with pytest.raises(UserError, match=what) as caught:
        build_source(
            configure(None, words(tmp_path, f"data.tokenizer={tmp_path / 'tokenizer.json'}")),
            "train",
        )
    assert "tokenizer.json" in caught.value.where


@pytest.mark.parametrize(
    ("added", "options", "words", "dropped"),
    [
        (["[SEP]"], {}, "ACGT[SEP]ACGT", "AN[SEP]ACGT"),
        (["\n", " "], {}, "ACGT\nACGT C", "ACGT\tACGT C"),
        (["\u00c91", "<m>"], {"lower": True}, "a\u00e91c\u00c91 <M> a", "a\u00e91c <m> xa"),
        ([], {"ignore_merges": True, "vocab": ["zq", "a"], "split": True}, "zq a", "zqa a"),
        (["xC"], {"single_word": True, "vocab": ["A", "C", " "]}, "A xC C", "AxC C"),
        (["<m>"], {"lstrip": True, "rstrip": True}, "AC \n <m> GT", "AC\nGT"),
    ],
)
def test_characters_that_a_bpe_model_drops(
    added: list[str], options: dict[str, Any], words: str, dropped: str, tmp_path: Path
) -> None:
    """Added tokens, which the library finds before or behind the normalizer, and whole words of
    ignore_merges drop nothing."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = options.get("vocab", [*"ACGTac "] if "lower" in options else [*"ACGT"])
    model = {"ignore_merges": True} if "ignore_merges" in options else {}
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: n for n, letter in enumerate(letters)}, [], **model)
    )
    if "lower" in options:
        made.normalizer = tokenizers.normalizers.Lowercase()
    if "split" in options:
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    of_token = {name: True for name in ("lstrip", "rstrip", "single_word") if name in options}
    made.add_tokens([tokenizers.AddedToken(one, **of_token) for one in added])
    made.save(str(tmp_path / "t.json"))
    tokenizer = read_tokenizer(tmp_path / "t.json")
    assert tokenizer.encode(words) == made.encode(words, add_special_tokens=False).ids
    with pytest.raises(UserError, match="the tokenizer has no tokens for"):
        tokenizer.encode(dropped)


def test_numbers_with_gaps_and_dropout(tmp_path: Path) -> None:
    """The model has a row for each number up to the largest; tokens are not drawn."""
    (tmp_path / "text.txt").write_text("the cat " * 20)
    vocabulary = {**TOKENIZER["model"]["vocab"], "the": 50}
    (tmp_path / "t.json").write_text(json.dumps(changed(model={"vocab": vocabulary})))
    found = text.build(
        "text", tmp_path / "text.txt", "train", context=3, tokenizer=tmp_path / "t.json"
    )
    assert (
        isinstance(found, text.Windows)
        and found.tokens.max() == 50
        and found.fields["tokens"].values == 51
    )
    assert found.notes == (
        f"t.json has {len(vocabulary)} tokens with numbers up to 50: the model gets 51, with gaps",
    )
    merges = {
        "type": "BPE",
        "vocab": {**{letter: n for n, letter in enumerate("acehtT")}, "th": 6},
        "merges": [["t", "h"]],
        "dropout": 0.5,
    }
    (tmp_path / "b.json").write_text(json.dumps({**TOKENIZER, "model": merges}))
    drawn = text.build(
        "text", tmp_path / "text.txt", "train", context=3, tokenizer=tmp_path / "b.json"
    )
    assert isinstance(drawn, text.Windows) and drawn.tokens.tolist() == [6, 2, 1, 0, 4] * 20
    assert "dropout of merges" in drawn.notes[0]
