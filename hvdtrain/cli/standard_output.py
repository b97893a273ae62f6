"""The standard output of the command line: a reader that goes away ends the printing, not the program."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from hvdtrain.errors import UserError


class StandardOutput(io.FileIO):
    """What is written after an error is dropped: to a closed pipe (`| head -3`) without a word, else after a UserError.

    is_job: the output is not what the program was started for, so there is no UserError either.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self.is_job = False
        self._is_lost = False

    def write(self, data: Any) -> int:
        try:
            return len(data) if self._is_lost else super().write(data)
        except BrokenPipeError:
            self._is_lost = True
        except OSError as error:
            self._is_lost = not self.is_job  # a disk may have room later
            if not self.is_job:
                what = f"cannot write to the standard output: {os.strerror(error.errno or 0)}"
                raise UserError(what, os.path.realpath(f"/proc/self/fd/{self.fileno()}"), "another file, or room on its disk") from None
        return len(data)


def open_standard_output() -> StandardOutput | None:
    """Replaces sys.stdout, where it is a file; None where it is not.

    Letters that its encoding does not have are written as \\u65e5, as on the standard error. A line is written when it is complete, so
    that what a model prints comes in its place among the lines of the job.
    """
    old = sys.stdout
    if type(old) is not io.TextIOWrapper:
        return None
    old.flush()
    raw = StandardOutput(old.fileno())
    errors = "backslashreplace" if old.errors == "strict" else old.errors
    buffer = raw if old.write_through else io.BufferedWriter(raw)  # write_through: PYTHONUNBUFFERED
    sys.stdout = io.TextIOWrapper(buffer, old.encoding, errors, line_buffering=True, write_through=old.write_through)
    return raw
