"""The command line: train, commands of extras, lists, and help. An exception on any rank ends every
rank."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hvdtrain.core.early_signals import REMEMBERED, EarlySignals
from hvdtrain.errors import DONE, UserError, closest, short
from hvdtrain.version import __version__

if TYPE_CHECKING:
    from hvdtrain.core.extras import Command

# commands that messages of hvdtrain and its pages name
_OF_EXTRAS = ("check", "evaluate", "export", "launch", "predict", "report")
_LISTS = ("list", "extras")  # what they print needs no arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the whole program on one rank; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _take_over_process(starts_job(arguments))
    try:
        code = run_command(_without_local_rank(arguments))
        if sys.stdout is not None:
            sys.stdout.flush()  # a disk that is full is noticed here
        return code
    except UserError as error:
        from hvdtrain.training.failure import end_every_rank

        return end_every_rank(error, None)
    except (ImportError, MemoryError, RuntimeError) as error:
        from hvdtrain.training.failure import end_every_rank, limit_reached

        if limit_reached(error) is None:
            raise
        return end_every_rank(error, None)
    except KeyboardInterrupt:  # of a command that saves nothing, or before a job can listen
        return 128 + signal.SIGINT
    finally:
        if argv is None:
            from hvdtrain.training.failure import discard_unwritten_output

            discard_unwritten_output()
            _ignore_checkpoint_signals()
            gc.freeze()  # the end of the interpreter would search all of torch for garbage: 0.4 s


def starts_job(arguments: Sequence[str]) -> bool:
    """Whether the arguments start training, here or on launched ranks."""
    name = arguments[0] if arguments else ""
    is_other = (
        name in (*_LISTS, "--version")
        or "--print-config" in arguments
        or (is_command(name) and name != "train" and not _extra_trains(name))
    )
    return not is_other and not {"-h", "--help"} & set(arguments)


def _extra_commands() -> Mapping[str, Command]:
    from hvdtrain.core import extras  # here: importing it takes longer than all of this module

    return extras.commands()


def _extra_trains(name: str) -> bool:
    from hvdtrain.core import extras

    return extras.trains(name)


def _is_on_ranks(name: str) -> bool:
    """Whether --num-nodes and so on start a command on ranks."""
    return name == "train" or (name in _extra_commands() and _extra_commands()[name].on_ranks)


def is_command(name: str) -> bool:
    """Whether a word is a command, including commands of extras."""
    is_word = name and "=" not in name and not name.startswith("-")
    return name == "train" or (bool(is_word) and name in _extra_commands())


def script() -> int:
    """The command `hvdtrain`: imports modules of the current folder first, as `python -m hvdtrain`
    does."""
    if not sys.flags.safe_path:
        with contextlib.suppress(FileNotFoundError):  # the folder was removed
            sys.path[0] = os.getcwd()
    return main()


def run_command(arguments: list[str]) -> int:
    """Runs the command that the arguments name, or trains if they name none. Raises UserError, or
    what the command raises."""
    name = arguments[0] if arguments else ""
    mode = _mode_of_train(arguments)
    if mode and (name.startswith("-") or "=" in name or _is_on_ranks(name)):
        return mode(arguments)
    if name != "train" and is_command(name):
        return _call(name, arguments[1:])
    help_index = next(
        (index for index, argument in enumerate(arguments) if argument in ("-h", "--help")), None
    )
    if help_index is not None:
        from hvdtrain.config.help import help_text

        if len(arguments) > help_index + 1:
            topic = arguments[help_index + 1]
        elif name in ("train", *_LISTS):
            topic = name
        else:
            topic = None
        if topic is not None and is_command(topic):
            return _call(topic, ["--help"])
        if topic is None and help_index:
            _check_command(name)
        print(help_text(topic))
    elif arguments == ["--version"]:
        print(f"hvdtrain {__version__}")
    elif name == "list" and not arguments[1:]:
        from hvdtrain.config.help import list_text

        print(list_text())
    elif name == "extras" and not arguments[1:]:
        from hvdtrain.core import extras

        print(extras.list_text())
    else:
        _check_command(name)
        return _call("train", arguments[1:] if name == "train" else arguments)
    return DONE


def _mode_of_train(arguments: Sequence[str]) -> Callable[[list[str]], int] | None:
    """Returns the function of an extra that runs instead of training if an argument is its option,
    such as --num-nodes."""
    options = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    if not options or {"-h", "--help"} & set(arguments):
        return None
    from hvdtrain.core.extras import modes

    for option, mode in modes("train").items():
        if options & {option, *mode.options}:
            name = f"train_{option.removeprefix('--').replace('-', '_')}"
            function: Callable[[list[str]], int] = getattr(
                importlib.import_module(mode.module), name
            )
            return function
    return None


def _without_local_rank(arguments: list[str]) -> list[str]:
    """Removes the --local_rank=N that torch.distributed.launch and deepspeed add. Raises UserError
    if the environment has another local rank."""
    options = [argument for argument in arguments if re.fullmatch(r"--local[-_]rank=\d+", argument)]
    if options:
        from hvdtrain.comm.launcher_variables import placement

        place = placement(os.environ)
        if any(int(option.partition("=")[2]) != place.local_rank for option in options):
            what = (
                f"{' '.join(options)}, but the environment says local rank {place.local_rank} of "
                f"{place.local_size}"
            )
            fix = (
                "without this option: hvdtrain reads its rank from the environment; or start it "
                "by one launcher"
            )
            raise UserError(what, f"command line; the launcher is {place.launcher}", fix)
    return [argument for argument in arguments if argument not in options]


def _check_command(name: str) -> None:
    """Raises UserError if the first argument is a script, or resembles the name of a command and is
    neither an option nor key=value."""
    if name.endswith(".py") and "=" not in name:
        fix = f"hvdtrain launch -np 2 -- {short(name)} on two ranks; python {short(name)} alone"
        raise UserError(
            f"{short(name)} is a script, not a command or a key of a job", "command line", fix
        )
    if "=" in name or name.startswith("-") or is_command(name):
        return
    if name in _OF_EXTRAS:
        raise UserError(
            f"this copy of hvdtrain has no extra with the command {name}",
            "command line",
            "`hvdtrain extras` lists those that it has; docs/extras.md lists all",
        )
    commands = ["train", *_LISTS, *_extra_commands()]
    meant = closest(name, commands)
    if meant == name:
        raise UserError(f"{name} takes no arguments", "command line", f"hvdtrain {name}")
    if meant is not None:
        raise UserError(
            f"there is no command {short(name)}",
            "command line",
            f"did you mean {meant}? commands: {', '.join(commands)}",
        )


def _call(name: str, arguments: list[str]) -> int:
    module = "hvdtrain.cli.train" if name == "train" else _extra_commands()[name].module
    command: Callable[[list[str]], int] = getattr(
        importlib.import_module(module), name.replace("-", "_")
    )
    return command(arguments)


def _take_over_process(is_job: bool) -> None:
    """Prepares the process before anything else; above all, a signal that asks for a checkpoint
    must not kill a job."""
    early_signals = EarlySignals()
    early_signals.install()
    if not is_job:
        early_signals.remove()
    from hvdtrain.cli.output import open_standard_output

    standard_output = open_standard_output()
    if standard_output is not None:
        standard_output.is_job = is_job


def _ignore_checkpoint_signals() -> None:
    """Ignores signals that ask for a checkpoint: the process is about to exit, and must not be
    killed by one."""
    for number in REMEMBERED:
        if signal.getsignal(number) is signal.SIG_DFL or isinstance(
            signal.getsignal(number), EarlySignals
        ):
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
