"""What a process imports at its start is never garbage, and is not searched for it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def lasting_imports() -> Iterator[Callable[[], None]]:
    """No search for garbage until the function that it yields is called, and none ever in what was made until then.

    They took a third of the processor time of a job of one step, most of it at the end of the interpreter (docs/performance.md, Start).
    For a process of our own: objects of a script's could be garbage that is never freed.
    """
    was_enabled = gc.isenabled()
    gc.disable()

    def imported() -> None:
        gc.freeze()
        _enable(was_enabled)

    try:
        yield imported
    finally:
        _enable(was_enabled)


def _enable(was_enabled: bool) -> None:
    if was_enabled:
        gc.enable()
