"""The program that each rank runs, from the words of a command after --."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Literal, NamedTuple

from hvdtrain.core import extras
from hvdtrain.errors import UserError, closest, short

_PYTHONS = ("python", "python3", f"python3.{sys.version_info.minor}")
NOT_ON_RANKS = ("list", "extras")  # the other commands, in addition to those of extras
WHERE = "command line of launch, after --"


def _jobs() -> list[str]:
    """Returns the commands of hvdtrain that run on ranks."""
    return ["train", *(name for name, each in extras.commands().items() if each.launched)]


class Program(NamedTuple):
    kind: Literal["hvdtrain", "script", "module", "program"]
    words: tuple[str, ...]  # arguments of hvdtrain, or the program with its arguments

    @property
    def is_job(self) -> bool:
        """Whether the program is hvdtrain. Its lines are not tagged, because rank 0 reports for all
        ranks."""
        return self.kind == "hvdtrain"


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
    if not first or first.startswith("-") or "=" in first or first in _jobs():
        _refuse_options(words, own_options)
        return Program("hvdtrain", tuple(words))
    if first in NOT_ON_RANKS or first in extras.commands():
        _refuse_options(words, own_options)
        fix = (
            f"{', '.join(['train (or nothing)', *_jobs()[1:]])}, key=value, a script.py or a "
            "program; other commands without launch: hvdtrain ..."
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
        meant = closest(name, _jobs()) if "/" not in name else None
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
