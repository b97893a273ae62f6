"""Ranks of a script that are in different calls of the context: what an engine says of it, as an error of the script."""

from __future__ import annotations

from hvdtrain.core.own_line import own_frame
from hvdtrain.errors import UserError

_OTHER_SIZE = ("MPI_ERR_TRUNCATE", "message truncated", "op.preamble.length <= op.nbytes")  # of MPI libraries and of Gloo


def different_calls(error: BaseException) -> UserError | None:
    """Where a message from another rank is larger than the one that this rank's call waits for; None for another error."""
    if isinstance(error, UserError) or not any(text in str(error) for text in _OTHER_SIZE):
        return None
    frame = own_frame(error)
    where = "a call of the context" if frame is None else f"{frame.filename}:{frame.lineno}: {frame.line}"
    fix = "the same calls of ctx on every rank: none under `if ctx.rank == 0`, no break or continue on one rank alone"
    return UserError("ranks make different calls: another rank is not in the one that this rank is in", where, fix)
