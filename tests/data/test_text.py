"""data.name=text: windows of bytes, of which each but the first is predicted once; tokenizers; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.config.read import configure
from hvdtrain.data.datasets import text
from hvdtrain.data.datasets.text import decode
from hvdtrain.data.source import notes_of
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
    assert [bytes(row.tolist()) for row in val.read(np.array([1, 0]))["tokens"]] == [b"fghijk", b"abcdef"]
    with pytest.raises(IndexError):
        val.read(np.array([2]))
    assert train.identity() != val.identity()


def test_one_file_is_divided(tmp_path: Path) -> None:
    (tmp_path / "book").write_bytes(TEXT.encode())
    path = tmp_path / "book"
    train, val, *_ = open_datasets(configure(None, words(path, "data.context=8", "data.val_share=0.25")))
    assert abs(len(val) - (len(train) + len(val)) / 4) <= 1
    with pytest.raises(UserError, match="book is one file, without a validation set"):
        open_datasets(configure(None, words(path)))


def test_bytes_become_text_again() -> None:
    assert decode(np.frombuffer("Grüße".encode(), np.uint8), None) == "Grüße"
    assert decode(np.array([97, 195]), None) == "a\\xc3"


@pytest.mark.parametrize(
    ("content", "more", "what"),
    [
        (b"fine\nline \xff two", [], "byte 10 is no UTF-8"),
        (b"short", ["data.context=5"], "5 tokens are no window of data.context=5 and one more"),
        (b"", [], "0 tokens are no window"),
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


TOKENIZER = {
    "version": "1.0",
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "to": 1, "be": 2, "or": 3}, "unk_token": "[UNK]"},
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
        text.build("text", tmp_path / "text.txt", "train", context=3, tokenizer=tmp_path / name) for name in ("plain.json", "changed.json")
    )
    assert isinstance(plain, text.Windows) and isinstance(found, text.Windows)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert len(found.tokens) >= 100 and plain.notes == ()
    (line,) = found.notes
    assert line.startswith("changed.json asks for truncation and padding") and line in notes_of(found)


@pytest.mark.parametrize(("content", "what"), [(None, "no such file"), (json.dumps(TOKENIZER)[:-30], "the tokenizer is damaged")])
def test_a_damaged_tokenizer_is_refused(content: str | None, what: str, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("to be")
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=what):
        build_source(configure(None, words(tmp_path, f"data.tokenizer={tmp_path / 'tokenizer.json'}")), "train")
