"""Whole lines out of the pieces that a pipe gives, each with the tag of its rank."""

from __future__ import annotations

LONGEST = 2**16  # bytes of a line that are kept until its end comes


class TaggedLines:
    """Tags the lines of one stream. Progress bars, whose lines end with a carriage return, get the tag each time."""

    def __init__(self, tag: bytes) -> None:
        self._tag = tag
        self._rest = b""  # without its end, not passed on yet
        self._is_within = False  # a line whose beginning was passed on

    @property
    def has_rest(self) -> bool:
        return bool(self._rest)

    def take(self, data: bytes) -> bytes:
        """The lines that are whole with this piece, tagged."""
        lines = (self._rest + data).splitlines(keepends=True)
        # a carriage return at the end of a piece may be half of \r\n
        self._rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        text = b"".join(map(self._tagged, lines))
        return text + self.flush() if len(self._rest) > LONGEST else text

    def flush(self) -> bytes:
        """What has come of a line without its end, as a prompt."""
        rest, self._rest = self._rest, b""
        return self._tagged(rest) if rest else b""

    def end(self) -> bytes:
        """The rest, tagged, where nothing follows: it gets the end that it lacks, so that no other rank's line goes on in it."""
        rest = self.flush() + b"\n" * self._is_within
        self._is_within = False
        return rest

    def _tagged(self, line: bytes) -> bytes:
        tag = b"" if self._is_within else self._tag
        self._is_within = not line.endswith((b"\n", b"\r"))
        return tag + line
