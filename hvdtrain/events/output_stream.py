"""A text stream straight to a file descriptor, for the thread that writes the screen."""

from __future__ import annotations

import contextlib
import io
import os
from typing import IO

from hvdtrain.errors import UserError


class OutputStream(io.TextIOBase):
    """Writes past Python's buffer: a thread that waits for the reader of a full pipe holds no lock that the end of the process needs.

    What a full disk or a terminal that is gone does not take is lost. Raises UserError where the reader of a pipe has gone away, and
    what `out` raises where that is no file, as in a notebook.
    """

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._number: int | None = None
        with contextlib.suppress(OSError):  # in memory
            self._number = os.dup(out.fileno()) if type(out) is io.TextIOWrapper else None
        self._encoding = getattr(out, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        data = text.encode(self._encoding, "backslashreplace")  # letters that the encoding lacks as \\u65e5
        try:
            if self._number is None:
                self._out.write(data.decode(self._encoding))
                self._out.flush()
            else:
                _write_all(self._number, data)
        except BrokenPipeError:
            raise UserError("its reader is gone") from None
        except OSError:
            pass
        return len(text)

    def has(self, letters: str) -> bool:
        """Whether the encoding has them."""
        with contextlib.suppress(UnicodeEncodeError):
            return bool(letters.encode(self._encoding))
        return False

    def close(self) -> None:
        if self._number is not None:
            os.close(self._number)
            self._number = None
        super().close()


def _write_all(number: int, data: bytes) -> None:
    while data:
        data = data[os.write(number, data) :]
