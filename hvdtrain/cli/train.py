"""hvdtrain [train] [--config FILE] [--max-time TIME] [--print-config] [key=value ...]: trains on
this rank."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator

from hvdtrain.config.plugins import check_names
from hvdtrain.config.read import to_yaml
from hvdtrain.core.extras import modes
from hvdtrain.errors import DONE, UserError
from hvdtrain.features.every_feature import configure
from hvdtrain.training.failure import check_limits

USAGE = """\
hvdtrain [train] [--config FILE] [--max-time TIME] [key=value ...]
  --config FILE      a YAML file of keys: configs/*.yaml, or what --print-config prints
  key=value          a key of the configuration: --help keys lists the most used, --help all-keys all; --help SECTION, --help KEY
  --max-time 3.5h    stop with a checkpoint before that time is over, exit code 75: the same command continues the job
  --print-config     print the resolved configuration, ready for --config; trains nothing
{modes}under mpirun, srun, torchrun or launch it is one rank of several"""  # noqa: E501


def train(arguments: list[str]) -> int:
    """Returns the exit code. Raises UserError only for a mistake in the configuration; other errors
    are reported and end every rank."""
    if {"-h", "--help"} & set(arguments):
        lines = [line for mode in modes("train").values() for line in mode.usage.splitlines()[1:]]
        print(USAGE.format(modes="".join(f"{line}\n" for line in lines)))
        return DONE
    config_file, arguments = _take_option(arguments, "--config", "configs/fashion_mnist.yaml")
    max_time, arguments = _take_option(arguments, "--max-time", "3.5h")
    if max_time is not None:
        arguments = [*arguments, f"guard.max_time={max_time}"]
    if "--print-config" in arguments:
        return _print_config(
            config_file, [argument for argument in arguments if argument != "--print-config"]
        )

    check_limits()
    with lasting_imports() as imported:
        from hvdtrain.training.failure import RankFailed
        from hvdtrain.training.run_rank import run_rank

        try:
            return run_rank(config_file, arguments, imported=imported).code
        except RankFailed as failed:
            return failed.code


def _print_config(config_file: str | None, arguments: list[str]) -> int:
    config = configure(config_file, arguments)
    check_names(config)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")  # the encoding in which configurations are read
    print(to_yaml(config), end="")
    return DONE


def _take_option(arguments: list[str], option: str, example: str) -> tuple[str | None, list[str]]:
    """Returns the value of `--option VALUE` or `--option=VALUE`, None without it, and the other
    arguments."""
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2], arguments[:index] + arguments[index + 1 :]
        if argument == option:
            if index + 1 == len(arguments):
                raise UserError(f"{option} needs a value", "command line", f"{option} {example}")
            return arguments[index + 1], arguments[:index] + arguments[index + 2 :]
    return None, arguments


@contextlib.contextmanager
def lasting_imports() -> Iterator[Callable[[], None]]:
    """Turns off garbage collection until the yielded function is called; objects that exist by then
    are never collected.

    Collections took a third of the CPU time of a job of one step, mostly at interpreter exit
    (docs/performance.md, Start). Only for hvdtrain's processes: in a script, unfreed objects could
    be garbage.
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
