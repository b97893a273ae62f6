"""The command line of a rank, and the settings of a job that `launch` has to know."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hvdtrain.config.read import expand, read_argument, read_file
from hvdtrain.errors import UserError, short
from hvdtrain.extras.launch.words import Program

RANK = "hvdtrain.extras.launch.rank"


def rank_command(
    program: Program,
    python: Sequence[str],
    *,
    plain: bool = False,
    logs: str | None = None,
    hosts: str | None = None,
    port: int | None = None,
    bind: str | None = None,
) -> tuple[str, ...]:
    """Returns the command line of a rank. plain: without the rank before each line; logs: the
    folder of its log file.

    hosts, port: for MASTER_ADDR and MASTER_PORT. bind: as comm.bind. Raises UserError if the
    job sets another value.
    """
    if program.is_job:
        return (*python, "-m", "hvdtrain", *_bound_words(program, bind))
    options = ["--plain"] * plain
    for option, value in (
        ("--logs", logs),
        ("--hosts", hosts),
        ("--port", port),
        ("--bind", bind),
    ):
        options += [] if value is None else [option, str(value)]
    return (*python, "-m", RANK, *options, program.kind, *program.words)


def _bound_words(program: Program, bind: str | None) -> tuple[str, ...]:
    """Returns the words of a job with comm.bind."""
    if bind is None:
        return program.words
    of_job = value_of(program.words, "comm.bind", bind)
    if of_job != bind:
        what = f"--bind {bind}, but the job has comm.bind={short(str(of_job))}"
        raise UserError(what, "command line of launch", "one of them")
    return (*program.words, f"comm.bind={bind}")


_RUN_CONFIG = "config.yaml"


def value_of(job: Sequence[str], key: str, default: Any = None) -> Any:
    """Returns the value of a key: of the last argument that sets it, otherwise of the last --config
    file, otherwise of the run folder that resume= names.

    Not for a script, which may call hvdtrain.train() with anything. Unreadable files set nothing;
    the job reports them.
    """
    value = default
    for path in _files(job):
        try:
            value = next(
                (assigned.value for assigned in read_file(path) if assigned.key == key), value
            )
        except UserError:
            continue
    return _of_arguments(job, key, value)


def _of_arguments(job: Sequence[str], key: str, default: Any) -> Any:
    value = default
    for argument in job:
        if argument.removeprefix("--").startswith(f"{key}="):
            try:
                value = read_argument(argument).value
            except UserError:
                continue
    return value


def _files(job: Sequence[str]) -> list[str]:
    """Returns the configuration files of the job, those with lower precedence first."""
    resumed = _of_arguments(job, "resume", None)
    files = (
        [str(expand(resumed, "resume") / _RUN_CONFIG)]
        if isinstance(resumed, str | Path) and str(resumed) not in ("auto", "no")
        else []
    )
    files += [following for argument, following in pairwise(job) if argument == "--config"]
    return files + [
        argument.partition("=")[2] for argument in job if argument.startswith("--config=")
    ]
