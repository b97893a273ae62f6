"""How a script's loop ends: in order, by an exception, or by the loss of another rank."""

from __future__ import annotations

import contextlib

from hvdtrain.context import loop_events
from hvdtrain.context.loop import ScriptLoop
from hvdtrain.context.saving import Saving
from hvdtrain.core.own_line import own_frame
from hvdtrain.errors import UserError
from hvdtrain.events.background_sink import CLOSE_S
from hvdtrain.training.sync_point import HASTY_S, close_all, fail

# error texts of MPI libraries and Gloo
_OTHER_SIZE = (
    "MPI_ERR_TRUNCATE",
    "message truncated",
    "op.preamble.length <= op.nbytes",
)


class Ending:
    """The part of a Context that ends a loop; its methods have the same names as the Context's."""

    def __init__(self, loop: ScriptLoop, saving: Saving, closing: contextlib.ExitStack) -> None:
        """closing: resources that are closed last."""
        self._loop = loop
        self._saving = saving
        self._closing = closing

    def close(self) -> int:
        loop = self._loop
        if loop.is_closed:
            return loop.code
        if loop.stream is not None:
            loop.points.sync(force=True)
            loop.points.end_epoch()
            self._saving.save_at_stop()
            loop.points.confirm()
            self._emit_end()
        self._release(failed=False)
        self._closing.close()
        return loop.code

    def _emit_end(self) -> None:
        loop = self._loop
        code = loop.code
        fields = loop_events.end_fields(
            loop.points.now,
            loop.why_over,
            code,
            loop.run.path,
            self._saving.failure,
            loop.config.checkpoint.keep_best,
        )
        loop.run.log.emit("stop" if code else "end", loop.step, **fields)

    def _release(self, *, failed: bool) -> None:
        loop = self._loop
        loop.is_closed = True
        if loop.is_open:
            close_all(loop.points, loop.stream.prefetcher if loop.stream else None, failed=failed)
        else:
            loop.run.log.close(CLOSE_S)

    def give_up(self) -> None:
        loop = self._loop
        if loop.is_closed:
            return
        loop.is_closed = True
        if loop.stream is not None:
            loop.stream.prefetcher.close(wait=False)
        if loop.is_open:
            loop.points.checkpoints.give_up()
            loop.points.checkpoints.close()
        loop.learner = None
        loop.is_open = False
        loop.run.log.close(HASTY_S)
        loop.run.files.close()

    def fail(self, error: BaseException) -> None:
        loop = self._loop
        if loop.is_closed:
            return
        error = different_calls(error) or error
        if loop.stream is not None:
            fail(loop.points, loop.step, error)
        self._release(failed=True)
        self._closing.__exit__(type(error), error, error.__traceback__)


def different_calls(error: BaseException) -> UserError | None:
    """Returns the error to report if another rank's message is larger than this rank's call
    expects, because ranks make different calls; None for other errors."""
    if isinstance(error, UserError) or not any(text in str(error) for text in _OTHER_SIZE):
        return None
    frame = own_frame(error)
    where = (
        "a call of the context"
        if frame is None
        else f"{frame.filename}:{frame.lineno}: {frame.line}"
    )
    fix = (
        "make the same calls of ctx on every rank: none under `if ctx.rank == 0`, no break or "
        "continue on one rank only"
    )
    return UserError(
        "ranks made different calls: another rank did not make this call",
        where,
        fix,
    )
