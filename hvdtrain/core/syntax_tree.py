"""Syntax trees of Python files, for ranks that are threads too."""

from __future__ import annotations

import ast
import threading

_one_at_a_time = threading.RLock()  # a finalizer may parse too


def syntax_tree(source: str | bytes) -> ast.Module:
    """Returns the tree of a file's text.

    Python 3.11 counts the depth of a tree once for all threads, so a thread raises SystemError if
    another one parses meanwhile (python/cpython#106905).
    """
    with _one_at_a_time:
        return ast.parse(source)
