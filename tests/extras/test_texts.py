"""data.name=jsonl, and texts in columns of tables: tokens, targets, chats and their answers; and
what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combinations import CHATS, OF_CHATS
from rank_threads import in_threads
from ranks import needs_extra

from hvdtrain.config.read import configure
from hvdtrain.core.extras import tables
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.extras.tokenizer_folders.chat_template import ChatTemplate, compiled
from hvdtrain.extras.tokenizer_folders.folder import read_folder
from hvdtrain.extras.trained_models.fit import fit
from hvdtrain.training.common_array import CommonArray
from hvdtrain.training.datasets import build_source, open_datasets
from hvdtrain.training.input import lengths_to_sort_by

TOKENIZER = read_folder(OF_CHATS, []).tokenizer
UNKNOWN, END, USER, ASSISTANT, STOP = range(5)
A, B, C = (TOKENIZER.number(letter) for letter in "abc")


def written(folder: Path, *records: Any, name: str = "train.jsonl") -> Path:
    """A file of these records; bytes are written as they are."""
    lines = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in records]
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    return folder / name


def opened(
    folder: Path, *words: str, split: Any = "train", tokenizer: Path | None = OF_CHATS
) -> Source:
    name = [] if any(word.startswith("data.name") for word in words) else ["data.name=jsonl"]
    more = [] if tokenizer is None else [f"data.tokenizer={tokenizer}"]
    return build_source(configure(None, [*name, f"data.root={folder}", *more, *words]), split)


def test_documents_are_padded_and_end_with_a_token(tmp_path: Path) -> None:
    written(tmp_path, {"text": "a b"}, b"  ", {"text": "c"}, {"text": ""}, {"text": "a b c a b"})
    source = opened(tmp_path, "data.context=4")
    assert [(name, field.values) for name, field in source.fields.items()] == [
        ("tokens", TOKENIZER.vocabulary),
        ("tokens_mask", 0),
    ]
    batch = source.read(np.array([2, 0, 1]))
    assert batch["tokens"].tolist() == [[A, B, C, A, B], [A, B, END, END, END], [C, *[END] * 4]]
    assert batch["tokens_mask"].sum(1).tolist() == [5, 3, 2]
    assert source.read(np.array([1]))["tokens"].shape == (1, 2)
    lengths = source.known_lengths("tokens")
    assert lengths is not None and lengths.tolist() == [3, 2, 5]
    counts, end = source.notes
    assert counts == (
        "train.jsonl: 3 documents, 10 tokens, 2 to 5 each; 1 cut to 5 tokens, 1 token not read "
        "(data.context); left out, as nothing is predicted in one token: 1"
    )
    assert end == "each document ends with [EOS] (data.special_tokens=false adds no tokens)"
    plain = opened(tmp_path, "data.context=4", "data.special_tokens=false")
    assert plain.read(np.array([0]))["tokens"].tolist() == [[A, B]] and len(plain) == 2
    assert "data.context=15 by default" in opened(tmp_path).notes[-1]
    in_bytes = opened(tmp_path, tokenizer=None)
    assert bytes(in_bytes.read(np.array([0]))["tokens"][0].tolist()) == b"a b"


@needs_extra("libraries")
def test_texts_with_labels(tmp_path: Path) -> None:
    """Names are numbered in order, those of the validation set as in the training set; numbers are
    what they are."""
    for name in ("train.jsonl", "val.jsonl"):
        rows = [("a", "x", 2, 0.5), ("b c", "k", 0, 1)] + [("c", "m", 1, -3)] * (name[0] == "t")
        records = [dict(zip(("text", "kind", "class", "score"), row, strict=True)) for row in rows]
        written(tmp_path, *records, name=name)
    words = ["data.target=kind", "batch.size=2", "model.name=transformers:x"]
    argv = ["data.name=jsonl", f"data.root={tmp_path}", f"data.tokenizer={OF_CHATS}", *words]
    train, val, task, _ = open_datasets(configure(None, argv))
    assert train.class_names == val.class_names == ("k", "m", "x") and task.sizes["classes"] == 3
    assert [source.known_labels().tolist() for source in (train, val)] == [[2, 0, 1], [2, 0]]  # type: ignore[union-attr]
    assert list(task.input_fields) == ["input_ids", "attention_mask"]
    batch = train.read(np.array([0, 1]))
    assert batch["input_ids"].tolist() == [[A, END], [B, C]] and batch["y"].tolist() == [2, 0]
    numbers = opened(tmp_path, "data.target=class")
    assert numbers.read(np.arange(3))["y"].tolist() == [2, 0, 1] and numbers.class_names == ()
    scores = opened(tmp_path, "data.target=score", "task.name=regression")
    assert scores.read(np.arange(3))["y"].tolist() == [0.5, 1.0, -3.0]
    assert scores.known_labels() is None


@needs_extra("libraries")
@pytest.mark.skipif(".csv" not in tables(), reason="this copy reads no tables")
def test_both_sets_have_names_or_numbers(tmp_path: Path) -> None:
    """Cells that look like numbers are names if others of the training set are."""
    cells = {"train.csv": "text,kind\na,1\nb,2\nc,a\n", "val.csv": "text,kind\nb,2\na,1\n"}
    for name, content in cells.items():
        (tmp_path / name).write_text(content)
    of_csv = ("data.name=csv", "data.text=text", "data.target=kind")
    val = opened(tmp_path, *of_csv, split="val")
    assert val.class_names == opened(tmp_path, *of_csv).class_names == ("1", "2", "a")
    assert val.read(np.arange(2))["y"].tolist() == [1, 0]
    (tmp_path / "train.csv").write_text("text,kind\na,3\nb,2\n")
    numbers = opened(tmp_path, *of_csv, split="val")
    assert numbers.read(np.arange(2))["y"].tolist() == [2, 1] and numbers.class_names == ()
    (tmp_path / "val.csv").write_text("text,kind\nb,2\na,z\n")
    with pytest.raises(UserError, match="has the class 'z', which the training set does not have"):
        opened(tmp_path, *of_csv, split="val")
    (tmp_path / "val.csv").unlink()
    (tmp_path / "train.csv").write_text("text,kind\na,1\nb,0\nc,1\na,0\n")
    config = configure(
        None,
        [
            f"data.root={tmp_path}",
            *of_csv,
            "data.val_share=0.5",
            "batch.size=2",
            "model.name=transformers:x",
        ],
    )
    task = open_datasets(config)[2]
    of_run = config.replace(data=config.data.replace(class_names=["0", "1", "a"]))
    with pytest.raises(UserError, match="y has no names of classes, as the run has: 0, 1, a"):
        fit(opened(tmp_path, *of_csv), task, of_run)
    written(tmp_path, {"text": "a", "kind": "x"}, {"text": "b", "kind": "y"})
    path = written(tmp_path, {"text": "a", "kind": 0}, name="val.jsonl")
    with pytest.raises(UserError, match="is a number, and the name of a class .*: x, y") as caught:
        opened(tmp_path, "data.target=kind", split="val")
    assert caught.value.where == f"{path}:1"


@pytest.mark.skipif(".csv" not in tables(), reason="this copy reads no tables")
def test_columns_of_tables_are_the_texts_of_json_lines(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [
        {"text": 'a "b"\nc', "kind": "x", "n": 3, "messages": [{"role": "user", "content": "a"}]},
        {
            "text": "b, c a",
            "kind": "y",
            "n": 1,
            "messages": [{"role": "assistant", "content": "b"}],
        },
        {"text": "c c", "kind": "x", "n": 2, "messages": [{"role": "user", "content": "c b a"}]},
    ]
    written(tmp_path, *records)
    with open(tmp_path / "t.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "kind", "n"])
        rows.writerows([[one["text"], one["kind"], one["n"]] for one in records])
    ways = (("csv", "t.csv"), ("parquet", "t.parquet"))
    table = pyarrow.Table.from_pylist(records)
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    for target in ([], ["data.target=kind"], ["data.target=n"]):
        expected = opened(tmp_path, *target)
        for name, file_name in ways:
            found = opened(tmp_path / file_name, f"data.name={name}", "data.text=text", *target)
            for field, array in expected.read(np.array([2, 0, 1])).items():
                np.testing.assert_array_equal(found.read(np.array([2, 0, 1]))[field], array)
            assert found.identity() == expected.identity()
            assert found.class_names == expected.class_names
    chats = opened(tmp_path / "t.parquet", "data.name=parquet", "data.messages=messages")
    assert chats.identity() == opened(tmp_path, "data.messages=messages").identity()
    with pytest.raises(UserError, match="field n is a number, expected text") as caught:
        opened(tmp_path / "t.parquet", "data.name=parquet", "data.text=n")
    assert str(caught.value.where).endswith("t.parquet, row 0")
    for words, what in (
        (["data.target=kind"], "data.target needs data.text: other columns of a table are numbers"),
        (["data.text=text", "data.dtypes={x: float32}"], "data.dtypes is for columns of numbers"),
        (["data.text=txt"], "no column txt"),
    ):
        with pytest.raises(UserError, match=what):
            opened(tmp_path / "t.csv", "data.name=csv", *words, tokenizer=None)


GOOD = {"text": "a b", "kind": "x", "messages": [{"role": "user", "content": "a"}]}
MESSAGES = ["data.messages=messages"]
WRONG: list[tuple[Any, list[str], str]] = [
    (b'{"text": "a', [], "the line is not JSON: Unterminated string starting at at character 10"),
    (b"[1, 2]", [], "the line is a list, expected an object"),
    (b"3", [], "the line is a number, expected an object"),
    (b"[" * 100_000, [], "the line is not JSON: RecursionError"),
    (b'{"text": "\xff"}', [], "byte 10 of the line is not UTF-8"),
    ({"txt": "a"}, [], "the record has no field text; it has txt"),
    ({}, [], "the record has no field text; it has none"),
    ({"text": None}, [], "field text is null"),
    ({"text": 3}, [], "field text is a number, expected text"),
    ({"text": [GOOD]}, [], "field text is a list, expected text"),
    (b'{"text": "a\\ud800"}', [], "field text has .ud800, which is half of a character"),
    ({"text": "a"}, ["data.target=kind"], "the record has no field kind"),
    ({"text": "a", "kind": 1}, ["data.target=kind"], "field kind is 1, a number, and a name in"),
    ({"text": "a", "kind": [1]}, ["data.target=kind"], r"field kind is \[1\], expected the name"),
    (b'{"text": "a", "kind": NaN}', ["data.target=kind"], "field kind is nan, expected the name"),
    ({"text": "", "kind": "x"}, ["data.target=kind"], "field text has no tokens"),
    ({"messages": "a"}, MESSAGES, "field messages is text, expected a list of {role, content}"),
    ({"messages": []}, MESSAGES, "field messages is an empty list"),
    ({"messages": ["a"]}, MESSAGES, "message 0 of messages is text, expected an object"),
    ({"messages": [{"role": "user"}]}, MESSAGES, "message 0 of messages has no content"),
    ({"messages": [{"role": 1, "content": ""}]}, MESSAGES, "role of message 0 of messages is a"),
    ({"messages": [{"from": "human", "value": ""}]}, MESSAGES, "has from and value, expected role"),
]


@pytest.mark.parametrize(("record", "words", "what"), WRONG)
def test_a_wrong_line_is_named(record: Any, words: list[str], what: str, tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, b"", record)
    with pytest.raises(UserError, match=what) as caught:
        opened(tmp_path, *words)
    assert caught.value.where == f"{path}:3" and caught.value.fix


def test_wrong_files_and_options(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"\n \n")
    short = written(tmp_path, {"text": "a"}, name="short.jsonl")
    good = written(tmp_path, GOOD, name="good.jsonl")
    written(tmp_path, GOOD, name="train.jsonl")
    written(tmp_path, GOOD | {"kind": "z"}, name="val.jsonl")
    bytes_of = {"tokenizer": None}
    for path, words, more, what in (
        (tmp_path / "empty.jsonl", [], {}, "there are no records"),
        (short, ["data.special_tokens=false"], {}, "no document has two tokens"),
        (tmp_path / "none.jsonl", [], {}, "No such file"),
        (good, [], {"split": "val"}, "good.jsonl contains all documents, without a validation set"),
        (tmp_path, ["data.target=kind"], {"split": "val"}, "has the class 'z', which the training"),
        (good, ["data.messages=messages", "data.text=text"], {}, "both name what is read"),
        (good, MESSAGES, bytes_of, "data.messages needs the chat template of a tokenizer"),
        (good, ["data.pad_token=x"], bytes_of, "data.pad_token needs data.tokenizer"),
        (good, ["data.pad_token=x"], {}, "the tokenizer has no token x"),
        (good, ["data.context=0"], {}, "a context of 0 tokens is impossible"),
        (good, ["data.target=text"], {}, "name the same field, text"),
        (good, [*MESSAGES, "data.target=kind"], {}, "a chat of data.messages has no label"),
        (good, MESSAGES, {"tokenizer": OF_CHATS / "tokenizer.json"}, "has no chat template"),
        (good, MESSAGES, {"tokenizer": tmp_path}, "no such file"),
    ):
        with pytest.raises(UserError, match=what):
            opened(path, *words, **more)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="data.name=jsonl needs data.root"):
        build_source(configure(None, ["data.name=jsonl"]), "train")
    path = written(tmp_path, GOOD)
    source = opened(path)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(UserError, match="the file has changed since the job began"):
        source.read(np.array([0]))


def chat(*contents: str) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}


@needs_extra("packing")
def test_answers_of_chats(tmp_path: Path) -> None:
    """Of a template without marks: what follows the prompt for an answer, to its last character."""
    path = written(tmp_path, chat("a", "b c", "c", "a"), chat("b"), chat("b", "c"))
    words = [*MESSAGES, "task.name=language", "task.loss_on=assistant"]
    source = opened(path, *words)
    batch = source.read(np.array([0, 2]))
    first = [USER, A, STOP, ASSISTANT, B, C, STOP, USER, C, STOP, ASSISTANT, A, STOP]
    second = [USER, B, STOP, ASSISTANT, C, STOP]
    assert batch["tokens"].tolist() == [first, [*second, *[END] * 7]]
    answers = [[4, 5, 6, 11, 12], [4, 5]]
    assert [np.flatnonzero(row).tolist() for row in batch["answers"]] == answers
    assert source.notes[0].endswith(
        "7 of them are predicted, in answers; 1 conversation without an answer"
    )
    packed = opened(path, *words, "data.pack=22").read(np.array([0]))
    assert packed["tokens"][0].tolist() == [*first, USER, B, STOP, *second]
    assert np.flatnonzero(packed["answers"]).tolist() == [*answers[0], 20, 21]
    cut = opened(path, *words, "data.context=4").read(np.array([0]))
    assert np.flatnonzero(cut["answers"]).tolist() == [4]
    with pytest.raises(UserError, match="no conversation has an answer of the assistant"):
        opened(written(tmp_path, chat("a")), *words)
    with pytest.raises(UserError, match="task.loss_on=assistant needs chats"):
        argv = [*words[1:], "data.name=text", f"data.root={path}"]
        open_datasets(configure(None, [*argv, "data.val_share=0.5", "data.context=8"]))


def template(text: str) -> ChatTemplate:
    return compiled(text, {"eos_token": "</s>"}, "folder")


EACH = "{% for m in messages %}"
PROMPT = "{% if add_generation_prompt %}A:{% endif %}"


def test_templates_that_mark_answers() -> None:
    marked = template(
        EACH + "{{ m['role'][0] }}:{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] + eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{{ '\n' }}{% endfor %}"
    )
    found = marked.rendered(chat("x", "y", "", "zz")["messages"], "here")
    assert found.text == "u:x\na:y</s>\nu:\na:zz</s>\n"
    assert [found.text[begin:end] for begin, end in found.answers] == ["y</s>", "zz</s>"]
    assert marked.with_answers(chat("x", "y")["messages"], "here").answers == ((6, 11),)
    with pytest.raises(UserError, match="which are not characters"):
        marked.rendered(chat("\ufdd0")["messages"], "here")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            EACH + "{{ m.content if loop.last else '-' }}{% endfor %}",
            "message 1 differently as the prompt for it .*, from character 0 on .'x', '---v' in",
        ),
        (
            EACH + "{{ m.content }}{% endfor %}{% if not add_generation_prompt %}!{% endif %}",
            "message 1 differently without the messages after it",
        ),
        ("{{ raise_exception('roles must alternate') }}", "fails: roles must alternate"),
        ("{{ messages[9].content }}", "the chat template fails: .*has no element 9"),
        ("{{ strftime_now('%d') }}", "fails: 'strftime_now' is undefined"),
        ("{{ messages.append(1) }}", "the chat template fails: .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", "the chat template fails: .*unsafe"),
        (
            "{{ cycler.__init__.__globals__.os.system('true') }}",
            "the chat template fails: .*unsafe",
        ),
    ],
)
def test_templates_that_do_not_show_answers(text: str, what: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        messages = chat("x", "yz", "w", "v")["messages"]
        template(text).with_answers(messages, "f:1")
    assert caught.value.where == "f:1" and caught.value.fix


def test_what_is_no_template(tmp_path: Path) -> None:
    for text in ("{% if %}", "{% generation %}", "{% include 'x' %}{% nothing %}"):
        with pytest.raises(UserError, match="the chat template, line 1: "):
            template(text)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((OF_CHATS / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{{ eos_token }}" + EACH + "{{ m.content }}\n\n{% endfor %}"
    )
    found = read_folder(tmp_path, []).chat_template()
    assert found.rendered(chat("a")["messages"], "").text == "[EOS]a\n\n"
    for content, what in (("[", "is not JSON"), ("[]", "is not a JSON object"), ("\xff", "utf-8")):
        (tmp_path / "tokenizer_config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(UserError, match=what) as caught:
            read_folder(tmp_path, [])
        assert "tokenizer_config.json" in caught.value.where


def test_ranks_measure_parts(tmp_path: Path) -> None:
    """And all of them raise what one of them finds."""
    words = [*CHATS.split(), "data.messages=messages", "task.loss_on=assistant", "batch.size=8"]
    alone = open_datasets(configure(None, words)).train
    wrong = written(tmp_path, *[GOOD] * 5, {"text": 3}, name="wrong.jsonl")

    def work(communicator: Any) -> tuple[Any, Any, str]:
        train = open_datasets(configure(None, words), communicator).train
        with pytest.raises(UserError) as caught:
            argv = ["data.name=jsonl", f"data.root={wrong}"]
            build_source(configure(None, argv), "train", CommonArray(communicator))
        return train.identity(), train.notes, caught.value.where

    for identity, notes, where in in_threads(3, work):
        assert (identity, notes) == (alone.identity(), alone.notes) and where == f"{wrong}:6"


def test_buckets_of_texts(tmp_path: Path) -> None:
    path = written(tmp_path, {"text": "a b"}, {"text": "c"}, {"text": "a b c"})
    config = configure(None, ["data.name=jsonl", "data.bucket_by=length"])
    for words, lengths in (([], [3, 2, 4]), (["data.text=text"], [3, 2, 4])):
        found = lengths_to_sort_by(config.data, opened(path, *words))
        assert found is not None and found.tolist() == lengths
