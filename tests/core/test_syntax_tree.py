from __future__ import annotations

import ast
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.core import syntax_tree as module
from hvdtrain.core.syntax_tree import syntax_tree


def _wait(_phase: str, _info: dict[str, int]) -> None:
    time.sleep(0.0002)  # another thread goes on, as it may while objects are collected


@pytest.fixture
def collected_while_parsing() -> Iterator[None]:
    threshold = gc.get_threshold()
    gc.callbacks.append(_wait)
    gc.set_threshold(40)
    yield
    gc.set_threshold(*threshold)
    gc.callbacks.remove(_wait)


@pytest.mark.usefixtures("collected_while_parsing")
def test_threads_parse_at_the_same_time() -> None:
    text = Path(module.__file__).read_text()
    errors = []

    def run() -> None:
        try:
            for _ in range(3):
                assert ast.get_docstring(syntax_tree(text)) == module.__doc__
        except SystemError as error:  # of ast.parse() in Python 3.11.7
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
