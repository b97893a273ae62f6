"""The command line: train, the other commands of hvdtrain/cli, list, and help; any exception on any rank ends every rank."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable, Sequence

from hvdtrain.errors import DONE, UserError
from hvdtrain.training.failure import discard_stdout, end_every_rank
from hvdtrain.version import __version__

COMMANDS = {  # each is the function of its name in that module
    "train": "hvdtrain.cli.train",
    "report": "hvdtrain.cli.report",
    "plan": "hvdtrain.cli.plan.command",
    "check": "hvdtrain.cli.check.command",
    "launch": "hvdtrain.cli.launch.command",
    "bench": "hvdtrain.cli.bench.command",
    "export": "hvdtrain.cli.export.command",
    "schema": "hvdtrain.cli.schema",
}
OWN_HELP = ("export", "launch", "bench", "report")


def main(argv: Sequence[str] | None = None) -> int:
    """The whole program on one rank; returns the exit code."""
    is_process = argv is None
    if is_process:
        _escape_letters()
    try:
        return run_command(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        return end_every_rank(error, None)
    except BrokenPipeError:  # `hvdtrain --help | head`: the reader has closed the pipe
        discard_stdout()
        return DONE
    finally:
        if is_process:
            _ignore_checkpoint_signals()


def run_command(arguments: list[str]) -> int:
    """Runs the command that the arguments name, training where they name none. Raises UserError, or what the command raises."""
    name = arguments[0] if arguments else ""
    if name in OWN_HELP:
        return _call(name, arguments[1:])
    from hvdtrain.config import help

    help_index = next((index for index, argument in enumerate(arguments) if argument in ("-h", "--help")), None)
    if help_index is not None:
        topic = arguments[help_index + 1] if len(arguments) > help_index + 1 else None
        print(help.help_text(topic))
    elif arguments == ["--version"]:
        print(f"hvdtrain {__version__}")
    elif arguments == ["list"]:
        print(help.list_text())
    elif name in ("plan", "check", "schema"):
        return _call(name, arguments[1:])
    elif any(argument.startswith(("--num-nodes", "--node-id", "--num-gpus")) for argument in arguments):
        from hvdtrain.cli.launch.spawn import spawn

        return spawn(arguments)
    else:
        return _call("train", arguments[1:] if name == "train" else arguments)
    return DONE


def _call(name: str, arguments: list[str]) -> int:
    command: Callable[[list[str]], int] = getattr(importlib.import_module(COMMANDS[name]), name)
    return command(arguments)


def _escape_letters() -> None:
    """Letters that the encoding of the standard output does not have are written as \\u65e5, as on the standard error."""
    if getattr(sys.stdout, "errors", None) == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _ignore_checkpoint_signals() -> None:
    """The process is about to end: a signal that asks for a checkpoint comes too late, and must not kill a process that ends by itself."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
