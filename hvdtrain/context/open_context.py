"""Opens a Context, and ends it if the script does not: after an exception, or after the script's
last line."""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Iterator, Sequence
from types import TracebackType

from hvdtrain.config.sections.section import COMMAND_LINE
from hvdtrain.context.context import Context
from hvdtrain.context.settings import WHERE, refuse_other_keys
from hvdtrain.core.process import exit_now
from hvdtrain.data.worker_pool import end_script_of_worker
from hvdtrain.errors import UserError, exit_code_of
from hvdtrain.training.failure import RankFailed, report_user_errors
from hvdtrain.training.run_rank import ConnectedRank, connected_rank


class _Open:
    """The open context of this process: one at most."""

    def __init__(self) -> None:
        self.contexts: list[object] = []


_OPEN = _Open()


def open_context(config_file: str | None, arguments: Sequence[str]) -> Context:
    """Opens the context that hvdtrain.init() returns. With one process a UserError is raised; with
    several an error ends all ranks."""
    rank, closing = connected(config_file, arguments, WHERE)
    try:
        context = Context(rank, closing)
    except BaseException as error:
        if isinstance(error, UserError):
            error.where = error.where.replace(COMMAND_LINE, WHERE)
        _end(closing, error)
        raise
    _follow_the_script(context, closing)
    return context


def connected(
    config_file: str | None, arguments: Sequence[str], where: str
) -> tuple[ConnectedRank, contextlib.ExitStack]:
    """Connects this rank with the others for a script's loop, and returns it with a stack that
    disconnects it. Raises as open_context().

    where: the script's call.
    """
    end_script_of_worker()
    report_user_errors()
    if _OPEN.contexts:
        raise UserError(
            "a context is already open", where, "one hvdtrain.init(); ctx.close() before another"
        )
    try:
        refuse_other_keys(config_file, arguments, where)
        closing = contextlib.ExitStack()
        rank = closing.enter_context(
            connected_rank(
                config_file,
                arguments,
                read_former_run=lambda _: [],
                from_script=True,
                what="script",
            )
        )
    except UserError as error:
        error.where = error.where.replace(COMMAND_LINE, where)
        raise
    except RankFailed as failed:
        sys.exit(failed.code)
    return rank, closing


@contextlib.contextmanager
def the_open_one(loop: object) -> Iterator[None]:
    """Rejects a second context meanwhile."""
    _OPEN.contexts.append(loop)
    try:
        yield
    finally:
        _OPEN.contexts.clear()


def _follow_the_script(context: Context, closing: contextlib.ExitStack) -> None:
    """Ends the context with the script, normally or by an exception that the script does not
    catch."""
    former = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Handles an uncaught exception. torch.distributed still calls it from its hook after the
        context is closed; then it does nothing."""
        (end if context in _OPEN.contexts else former)(kind, error, trace)

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Handles an exception that the script did not catch: with several ranks all exit here."""
        sys.excepthook = former
        try:
            context.fail(error)
        except RankFailed as failed:
            exit_now(failed.code)
        except BaseException as own:
            if own is not error:
                former(type(own), own, own.__traceback__)
        former(kind, error, trace)
        exit_now(exit_code_of(error))

    def close_at_exit() -> None:
        try:
            context.close()
        except Exception as error:
            end(type(error), error, error.__traceback__)

    def forget() -> None:
        _OPEN.contexts.clear()
        atexit.unregister(close_at_exit)
        if sys.excepthook is hook:
            sys.excepthook = former

    _OPEN.contexts.append(context)
    atexit.register(close_at_exit)
    sys.excepthook = hook
    closing.callback(forget)


def _end(closing: contextlib.ExitStack, error: BaseException) -> None:
    """Ends all ranks; on one process it returns, and the caller raises the error."""
    try:
        closing.__exit__(type(error), error, error.__traceback__)
    except RankFailed as failed:
        sys.exit(failed.code)
    except BaseException as other:
        if other is not error:
            raise
