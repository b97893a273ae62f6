"""Exit codes: of every kind of exception, and their table in docs/keys.md."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import torch
from ranks import needs_horovod, needs_mpirun, python

from hvdtrain.errors import (
    ADVICE,
    BUG,
    DIVERGED,
    LOST,
    MEANINGS,
    MEMORY,
    USER,
    Diverged,
    UserError,
    exit_code_of,
)

PAGE = Path(__file__).parents[2] / "docs" / "keys.md"


def torch_without_memory() -> BaseException:
    """What torch raises where the host has too little memory."""
    try:
        torch.empty(1 << 60)
    except RuntimeError as error:
        return error
    raise AssertionError("there were 4 exabytes")


def test_out_of_memory() -> None:
    assert (
        exit_code_of(MemoryError())
        == exit_code_of(torch_without_memory())
        == exit_code_of(torch.OutOfMemoryError("x"))
        == MEMORY
    )
    assert (
        exit_code_of(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes")) == MEMORY
    )
    assert "batch.micro" in ADVICE[MEMORY]


@needs_mpirun
def test_a_lost_rank_under_mpi() -> None:
    code = (
        "from mpi4py import MPI; from hvdtrain.errors import exit_code_of; "
        "print(exit_code_of(MPI.Exception(MPI.ERR_OTHER)))"
    )
    result = python(["-c", code], is_warm=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{LOST}\n", "")


@needs_horovod
def test_a_lost_rank_under_horovod() -> None:
    error = importlib.import_module("horovod.common.exceptions").HorovodInternalError
    assert exit_code_of(error("Connection closed by peer")) == LOST
    assert exit_code_of(error("Mismatched allreduce tensor shapes")) == BUG, (
        "ranks that call different collectives are our bug"
    )


def test_user_errors_have_their_own_code() -> None:
    assert exit_code_of(UserError("x")) == USER and exit_code_of(Diverged("x")) == DIVERGED
    assert (
        str(UserError("what", "where", "how")) == "what\n  where: where\n  fix: how"
        and str(UserError("what")) == "what"
    )


def test_other_exceptions_are_bugs() -> None:
    assert (
        exit_code_of(ValueError("x"))
        == exit_code_of(RuntimeError("mat1 and mat2 shapes"))
        == exit_code_of(SystemExit(0))
        == BUG
    )


def test_the_table_of_exit_codes() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE))
    assert rows == {str(code): meaning for code, meaning in MEANINGS.items()}
