"""The program that each rank runs, from the words after --, and the settings of a job that `launch`
has to know."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hvdtrain.config.read import expand, read_argument, read_file
from hvdtrain.core import extras
from hvdtrain.errors import UserError, closest, short

_PYTHONS = ("python", "python3", f"python3.{sys.version_info.minor}")
_JOBS = ("train", "check")  # commands of hvdtrain that run on ranks
NOT_ON_RANKS = (  # the other commands, in addition to the commands of extras
    "launch",
    "export",
    "evaluate",
    "predict",
    "schema",
    "list",
    "extras",
)
WHERE = "command line of launch, after --"
RANK = "hvdtrain.cli.launch.rank"


class Program(NamedTuple):
    kind: Literal["hvdtrain", "script", "module", "program"]
    words: tuple[str, ...]  # arguments of hvdtrain, or the program with its arguments

    @property
    def is_job(self) -> bool:
        """Whether the program is hvdtrain. Its lines are not tagged, because rank 0 reports for all
        ranks."""
        return self.kind == "hvdtrain"

    def command(
        self,
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
        if self.is_job:
            return (*python, "-m", "hvdtrain", *self._bound_words(bind))
        options = ["--plain"] * plain
        for option, value in (
            ("--logs", logs),
            ("--hosts", hosts),
            ("--port", port),
            ("--bind", bind),
        ):
            options += [] if value is None else [option, str(value)]
        return (*python, "-m", RANK, *options, self.kind, *self.words)

    def _bound_words(self, bind: str | None) -> tuple[str, ...]:
        """Returns the words of a job with comm.bind."""
        if bind is None:
            return self.words
        of_job = value_of(self.words, "comm.bind", bind)
        if of_job != bind:
            what = f"--bind {bind}, but the job has comm.bind={short(str(of_job))}"
            raise UserError(what, "command line of launch", "one of them")
        return (*self.words, f"comm.bind={bind}")


def read_program(words: Sequence[str], own_options: Sequence[str]) -> Program:
    """Returns the program that the words name. Raises UserError for an option of launch among the
    words of a job, and for a command of hvdtrain that does not run on ranks."""
    first = words[0] if words else ""
    if (
        first in _PYTHONS and len(words) > 1 and (_is_script(words[1]) or words[1] == "-m")
    ):  # as after horovodrun or mpirun
        return read_program(words[1:], own_options)
    if first == "-m" and len(words) > 1 and words[1] != "hvdtrain":
        return Program("module", tuple(words[1:]))
    if first in ("-m", "hvdtrain") and len(words) > 1:
        return read_program(words[1 + (first == "-m") :], own_options)
    if _is_script(first):
        return Program("script", tuple(words))
    if not first or first.startswith("-") or "=" in first or first in _JOBS:
        _refuse_options(words, own_options)
        return Program("hvdtrain", tuple(words))
    if first in NOT_ON_RANKS or first in extras.commands():
        _refuse_options(words, own_options)
        fix = (
            "train (or nothing), check, key=value, a script.py or a program; other commands "
            "without launch: hvdtrain ..."
        )
        raise UserError(f"'{short(first)}' is not something that launch can start", WHERE, fix)
    return Program("program", tuple(words))


def check_exists(program: Program) -> None:
    """Raises UserError for a script or a program that does not exist on this machine."""
    name = program.words[0] if program.words else ""
    if program.kind == "script" and not os.path.isfile(name):
        raise UserError(f"there is no script {short(name)}", WHERE, "the path of a Python file")
    if (
        program.kind == "program"
        and os.path.isfile(name)
        and "/" in name
        and not os.access(name, os.X_OK)
    ):
        raise UserError(
            f"{short(name)} is not executable",
            WHERE,
            f"chmod +x {short(name)}; or sh {short(name)}",
        )
    if program.kind == "program" and shutil.which(name) is None:
        meant = closest(name, _JOBS) if "/" not in name else None
        fix = (
            f"did you mean {meant}?"
            if meant
            else "a Python file ending with .py, a program on the PATH, ./program; or key=value "
            "of hvdtrain"
        )
        raise UserError(f"there is no program {short(name)}", WHERE, fix)


def _is_script(word: str) -> bool:
    return word.endswith(".py") and "=" not in word


def _refuse_options(words: Sequence[str], own_options: Sequence[str]) -> None:
    misplaced = next((word for word in words if word.partition("=")[0] in own_options), None)
    if misplaced is not None:
        option = short(misplaced)
        raise UserError(
            f"{option} is an option of launch", WHERE, f"before --: launch {option} ... -- ..."
        )


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
