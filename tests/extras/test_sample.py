"""`sample`: text, and mistakes; tests/extras/test_image_tokens_sample.py has images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from combinations import OF_CHATS
from ranks import needs_extra

from hvdtrain.__main__ import main
from hvdtrain.config.read import configure
from hvdtrain.core.extras import document_files, token_images
from hvdtrain.errors import UserError
from hvdtrain.extras.sample.command import USAGE, sample
from hvdtrain.extras.sample.grid import grid
from hvdtrain.extras.sample.prompt import read_prompt
from hvdtrain.extras.tokenizer_folders.folder import read_folder

MODEL = [
    "task.name=language",
    "model.name=gpt",
    "model.layers=1",
    "model.heads=2",
    "model.width=8",
    "optim.name=adamw",
]
SHORT = ["max_steps=3", "batch.size=16", "batch.evaluate=100", "log.every_steps=3"]


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "train.txt").write_text("abab" * 100)
    (folder / "val.txt").write_text("abab" * 20)
    run = folder / "run"
    assert (
        main(
            [
                "data.name=text",
                f"data.root={folder}",
                "data.context=8",
                *MODEL,
                *SHORT,
                f"run={run}",
            ]
        )
        == 0
    )
    return run


def test_text(text_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = text_run
    assert main(["sample", str(run), "--count", "2", "--prompt", "aba", "--length", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "--- 1" in lines and "--- 2" in lines
    assert lines[lines.index("--- 1") + 1].startswith("aba")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--count", "0"], "0 is not a value of --count"),
        (["--temperature", "-1"], "-1 is not a value of --temperature"),
        (["--temperature", "nan"], "nan is not a value of --temperature"),
        (["--png", "grid.jpg"], "grid.jpg does not end in .png"),
        (["--seed", "x"], "x is not a value of --seed"),
        (["--pgn", "x.png"], "unknown argument '--pgn'"),
    ],
)
def test_a_mistake_in_the_command_line(arguments: list[str], what: str) -> None:
    with pytest.raises(UserError, match=what):
        sample(["run", *arguments])


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--prompt", "nine char"], "the prompt has 9 tokens\n  where: --prompt\n  fix: 1 to 8"),
        (["--prompt", ""], "the prompt has 0 tokens"),
        (["--prompt-half"], "--prompt-half is for images; the run has data.name=text"),
        (["--png", "x.png"], "--png is for images; the run has data.name=text"),
    ],
)
def test_what_a_text_cannot_begin_with(
    arguments: list[str], what: str, text_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", str(text_run), *arguments]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.skipif(not document_files(), reason="this copy reads no JSON lines")
def test_what_a_text_begins_with_is_as_in_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message of a user where the run has learned from chats; special tokens before a text."""
    folder = read_folder(OF_CHATS, [])
    a = folder.tokenizer.number("a")
    user, assistant, stop = 2, 3, 4
    words = ["data.name=jsonl", f"data.root={tmp_path}", f"data.tokenizer={OF_CHATS}"]
    for more, expected in (
        (["data.messages=messages"], [user, a, stop, assistant]),
        (["data.text=text"], [a]),
        (["data.text=text", "data.special_tokens=false"], [a]),
    ):
        begin = read_prompt(configure(None, [*words, *more]).data, "a")
        assert begin.tokens.tolist() == expected and begin.ends == (1,)
    chat = [{"role": role, "content": "a b"} for role in ("user", "assistant")]
    for split in ("train", "val"):
        (tmp_path / f"{split}.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 20)
    run = tmp_path / "run"
    assert main([*words, "data.messages=messages", *MODEL, *SHORT, f"run={run}"]) == 0
    capsys.readouterr()
    assert main(["sample", str(run), "--prompt", "a", "--length", "3", "--count", "2"]) == 0
    assert capsys.readouterr().out.count("--- ") == 2


@needs_extra("evaluate")
def test_a_tokenizer_with_more_tokens_than_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replaced since the training, or cut off."""

    def write(*more: str) -> None:
        vocabulary = {word: number for number, word in enumerate(["[UNK]", "to", "be", *more])}
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
        (tmp_path / "t.json").write_text(
            json.dumps({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model})
        )

    for split in ("train", "val"):
        (tmp_path / f"{split}.txt").write_text("to be " * 100)
    write()
    words = [
        "data.name=text",
        f"data.root={tmp_path}",
        f"data.tokenizer={tmp_path / 't.json'}",
        "data.context=8",
    ]
    assert main([*words, *MODEL, *SHORT, f"run={tmp_path / 'run'}"]) == 0
    assert (
        main(
            ["sample", str(tmp_path / "run"), "--prompt", "to be", "--count", "1", "--length", "4"]
        )
        == 0
    )
    run = str(tmp_path / "run")
    assert main(["evaluate", run]) == 0
    (tmp_path / "t.json").write_text((tmp_path / "t.json").read_text().replace(" ", "\n"))
    assert main(["evaluate", run]) == 0
    earlier = (tmp_path / "t.json").read_text()
    (tmp_path / "t.json").write_text(
        earlier.replace('"to":\n1', '"to":\n2').replace('"be":\n2', '"be":\n1')
    )
    for command in (["evaluate", run], ["sample", run, "--prompt", "to be"]):
        capsys.readouterr()
        assert main(command) == 2
        assert "the tokenizer has different tokens than the one that" in capsys.readouterr().err
    write("or", "not")
    assert main(["sample", str(tmp_path / "run"), "--prompt", "to be or not"]) == 2
    assert (
        "the tokenizer returns token 4 for the prompt, but the model only has 0 to 2"
        in capsys.readouterr().err
    )
    (tmp_path / "t.json").write_text((tmp_path / "t.json").read_text()[:-30])
    assert main(["sample", str(tmp_path / "run"), "--prompt", "to"]) == 2
    assert "the tokenizer is damaged" in capsys.readouterr().err


def test_help_is_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert sample(["--help"]) == 0
    assert capsys.readouterr().out.strip() == USAGE


def test_a_grid_by_hand() -> None:
    images = np.stack([np.full((64, 64, 1), value, np.uint8) for value in (1, 2, 3)])
    page = grid(images)
    assert page.shape == (130, 130, 1)
    assert page[0, 0, 0] == 1 and page[0, 66, 0] == 2 and page[66, 0, 0] == 3
    assert page[0, 64, 0] == page[66, 66, 0] == 255
    assert grid(np.zeros((1, 16, 16, 3), np.uint8)).shape == (64, 64, 3)


def test_a_run_of_other_data_cannot_be_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["model.name=linear", "max_steps=1", "run=classes"]) == 0
    assert main(["sample", "classes", "--png", "other.png"]) == 2
    supported = "image_tokens and text" if token_images() else "text"
    assert (
        f"sample supports data.name={supported}, and texts of jsonl, csv and parquet; the run has "
        "data.name=digits" in capsys.readouterr().err
    )
