"""hvdtrain.run() without lost ranks: a script's loop as a function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hvdtrain as ht
from hvdtrain.errors import UserError


def test_one_process(tmp_path: Path) -> None:
    """Code 0 of a loop that is over, the script's own error, and no context is left open."""
    calls = []

    def train(ctx: ht.Context) -> None:
        calls.append(ctx.size)
        if len(calls) == 2:
            raise ValueError("mine")

    assert ht.run(train, {"run": str(tmp_path / "run")}) == 0
    with pytest.raises(ValueError, match="mine"):
        ht.run(train)
    assert calls == [1, 1]
    ht.init().close()


@pytest.mark.parametrize(
    ("train", "words", "what", "fix"),
    [
        (3, [], "3 is not a function of a context", "def train(ctx)"),
        (
            print,
            ["guard.lost=restart", "run=somewhere"],
            "guard.lost is not supported in a custom loop",
            "guard.lost=shrink",
        ),
        (lambda ctx: ht.init(), [], "a context is already open", "one hvdtrain.init()"),
    ],
)
def test_what_cannot_be(
    train: Any,
    words: list[str],
    what: str,
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        ht.run(train, *words)
    assert what in caught.value.what and fix in caught.value.fix, str(caught.value)
    ht.init().close()
