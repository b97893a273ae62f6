"""The program of the ranks that tests start: calls a function by name, with arguments as JSON.

python tests/support/on_ranks.py MODULE:FUNCTION [JSON]; its result is the exit code. waiting_rank:wait is the function of ranks that wait
for calls (pool.py); others are of tests that start, signal and end their own processes.
"""  # noqa: E501

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any


def function_of(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    called: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return called


if __name__ == "__main__":
    sys.exit(function_of(sys.argv[1])(*json.loads(sys.argv[2] if len(sys.argv) > 2 else "[]")))
