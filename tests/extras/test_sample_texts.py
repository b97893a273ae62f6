"""log.samples: texts that the model draws at each evaluation.
tests/extras/test_image_tokens_samples.py has images."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.__main__ import main
from hvdtrain.config.read import configure
from hvdtrain.errors import DONE, UserError
from hvdtrain.training.conflicts import refuse_conflicts

MODEL = [
    "task.name=language",
    "model.name=gpt",
    "model.layers=1",
    "model.heads=2",
    "model.width=8",
    "optim.name=adamw",
]


def test_texts_begin_with_the_first_character_of_the_validation_text(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("abab" * 100)
    (tmp_path / "val.txt").write_text("baba" * 20)
    words = [
        "data.name=text",
        f"data.root={tmp_path}",
        "data.context=8",
        *MODEL,
        "max_steps=2",
        "batch.size=16",
        "log.samples=3",
    ]
    assert main([*words, f"run={tmp_path / 'run'}"]) == DONE
    text = (tmp_path / "run" / "samples" / "step-00000002.txt").read_text()
    assert text.count("--- ") == 3 and text.startswith("--- 1\nb") and "\n--- 3\nb" in text


def test_tokens_that_show_nothing() -> None:
    config = configure(
        None, ["data.name=own_data:tokens", "task.name=language", "model.name=gpt", "log.samples=4"]
    )
    with pytest.raises(
        UserError,
        match="displays images or text, but how to display tokens of "
        "data.name=own_data:tokens is unknown",
    ):
        refuse_conflicts(config, "single", 1)
