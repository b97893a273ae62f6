"""The command line: train, plan, list, and help; any exception on any rank ends every rank."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdtrain import __version__, manual
from hvdtrain.configure import Origins, configure, to_yaml
from hvdtrain.errors import BUG, DONE, USER, UserError
from hvdtrain.leaf import check_names

if TYPE_CHECKING:
    from hvdtrain.comm.engine import Engine
    from hvdtrain.config import Config

ECHO_S = 1.5  # what one rank stumbles over most often stops all: the others wait this long for rank 0 to tell it and end the job


def main(argv: Sequence[str] | None = None) -> int:
    """The whole program on one rank; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(words)
    except UserError as error:
        return _fail(f"hvdtrain: {error}", USER, None)
    except BrokenPipeError:  # `hvdtrain --help | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def _command(words: list[str]) -> int:
    asks = next((place for place, word in enumerate(words) if word in ("-h", "--help")), None)
    if asks is not None:
        print(manual.help_text(words[asks + 1] if len(words) > asks + 1 else None))
    elif words == ["--version"]:
        print(f"hvdtrain {__version__}")
    elif words == ["list"]:
        print(manual.list_text())
    elif words[:1] == ["plan"]:
        from hvdtrain.launch.plan import plan

        return plan(words[1:])
    else:
        path, words = _take_option(words[words[:1] == ["train"] :], "--config")
        config, origins = configure(path, [word for word in words if word != "--print-config"])
        check_names(config, origins)
        if "--print-config" not in words:
            return run(config, origins)
        print(to_yaml(config), end="")
    return DONE


def run(config: Config, origins: Origins) -> int:
    """Trains, and ends every rank where one fails."""
    from hvdtrain.comm.placement import placement
    from hvdtrain.recipe.compose import for_ranks
    from hvdtrain.run.build import check_batch, connect
    from hvdtrain.run.job import prepare, train_job

    engine: Engine | None = None
    try:
        place = placement(os.environ)
        config, origins = for_ranks(config, origins, place.size)
        check_batch(config, origins, place.size)
        parts = prepare(config, origins)
        engine, why = connect(config, origins, place)
        train_job(config, origins, parts, engine, why)
        engine.close()
        return DONE
    except UserError as error:
        return _fail(f"hvdtrain: {error}", USER, engine)
    except BaseException:  # SystemExit too: a rank that leaves alone would let the others wait for ever
        return _fail(traceback.format_exc().rstrip(), BUG, engine)


def _fail(text: str, code: int, engine: Engine | None) -> int:
    """Says what went wrong and ends the job: all ranks at once where an engine connects them, else by this rank's exit code."""
    rank = _rank(engine)
    if rank:
        time.sleep(ECHO_S)
    who = f"rank {rank} on {socket.gethostname()}"
    print(text if code == USER and not rank else f"{text}\n{who}: the error above ends the job", file=sys.stderr, flush=True)
    if engine is not None and engine.size > 1:
        engine.abort(code)
    return code


def _rank(engine: Engine | None) -> int:
    if engine is not None:
        return engine.rank
    from hvdtrain.comm.placement import placement

    try:
        return placement(os.environ).rank
    except UserError:
        return 0


def _take_option(words: list[str], option: str) -> tuple[str | None, list[str]]:
    """The value of `--option VALUE` or `--option=VALUE`, and the other words."""
    for place, word in enumerate(words):
        if word.startswith(f"{option}="):
            return word.partition("=")[2], words[:place] + words[place + 1 :]
        if word == option:
            if place + 1 == len(words):
                raise UserError(f"{option} needs a file", "command line", f"{option} configs/fashion_mnist.yaml")
            return words[place + 1], words[:place] + words[place + 2 :]
    return None, words


if __name__ == "__main__":
    sys.exit(main())
