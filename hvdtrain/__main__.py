"""The command line: train, plan, check, launch, bench, export, report, list, and help; any exception on any rank ends every rank."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable, Sequence

from hvdtrain.errors import DONE, USER, UserError
from hvdtrain.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """The whole program on one rank; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _write_all_letters()
    try:
        return _command(words)
    except UserError as error:
        from hvdtrain.cli.train import fail  # this module imports what a command needs where it needs it: --help takes 0.2 s

        return fail(f"hvdtrain: {error}", USER, None)
    except BrokenPipeError:  # `hvdtrain --help | head`: the reader has seen enough
        from hvdtrain.cli.train import hush

        hush()
        return DONE
    finally:
        if argv is None:
            _ignore_late_wishes()


def _write_all_letters() -> None:
    """A name in letters that the standard output's encoding has not comes as \\u65e5, as on the standard error, and ends nothing."""
    if getattr(sys.stdout, "errors", None) == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _ignore_late_wishes() -> None:
    """The process is about to end: a scheduler's wish for a checkpoint comes too late, and must not kill what has ended by itself."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)


def _command(words: list[str]) -> int:
    name = words[0] if words else ""
    if name in ("export", "launch", "bench", "report"):  # which tell about themselves
        return _other(name, words[1:])
    from hvdtrain.config import help

    asks = next((place for place, word in enumerate(words) if word in ("-h", "--help")), None)
    if asks is not None:
        print(help.help_text(words[asks + 1] if len(words) > asks + 1 else None))
    elif words == ["--version"]:
        print(f"hvdtrain {__version__}")
    elif words == ["list"]:
        print(help.list_text())
    elif name in ("plan", "check"):
        return _other(name, words[1:])
    elif any(word.startswith(("--num-nodes", "--node-id", "--num-gpus")) for word in words):
        from hvdtrain.cli.launch.spawn import spawn

        return spawn(words)
    else:
        return _train(words)
    return DONE


def _train(words: list[str]) -> int:
    """`hvdtrain [train] [--config FILE] [--max-time TIME] [--print-config] [key=value ...]`"""
    from hvdtrain.cli.train import run
    from hvdtrain.config.plugins import check_names
    from hvdtrain.config.read import configure, to_yaml

    path, words = _take_option(words[words[:1] == ["train"] :], "--config")
    limit, words = _take_option(words, "--max-time")
    words += [f"guard.max_time={limit}"] * (limit is not None)
    if "--print-config" not in words:
        return run(path, words)
    config, _ = configure(path, [word for word in words if word != "--print-config"])
    check_names(config)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")  # as configurations are read
    print(to_yaml(config), end="")
    return DONE


def _other(command: str, words: list[str]) -> int:
    """A command of hvdtrain/cli: the function of its own name, in cli/COMMAND.py or cli/COMMAND/command.py."""
    module = "hvdtrain.cli.report" if command == "report" else f"hvdtrain.cli.{command}.command"
    function: Callable[[list[str]], int] = getattr(importlib.import_module(module), command)
    return function(words)


def _take_option(words: list[str], option: str) -> tuple[str | None, list[str]]:
    """The value of `--option VALUE` or `--option=VALUE`, and the other words."""
    for place, word in enumerate(words):
        if word.startswith(f"{option}="):
            return word.partition("=")[2], words[:place] + words[place + 1 :]
        if word == option:
            if place + 1 == len(words):
                example = {"--config": "configs/fashion_mnist.yaml", "--max-time": "3.5h"}[option]
                raise UserError(f"{option} needs a value", "command line", f"{option} {example}")
            return words[place + 1], words[:place] + words[place + 2 :]
    return None, words


if __name__ == "__main__":
    sys.exit(main())
