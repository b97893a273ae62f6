"""Exit codes: what each unexpected exception becomes, and that the README tells the same ones."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
from ranks import needs_horovod

from hvdtrain.errors import ADVICE, BUG, LOST, MEANINGS, MEMORY, code_of

README = Path(__file__).parents[2] / "README.md"


def torch_without_memory() -> BaseException:
    """What torch raises where the host has not that much memory."""
    try:
        torch.empty(1 << 60)
    except RuntimeError as error:
        return error
    raise AssertionError("there were 4 exabytes")


def test_no_memory() -> None:
    assert code_of(MemoryError()) == code_of(torch_without_memory()) == code_of(torch.OutOfMemoryError("x")) == MEMORY
    assert code_of(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes")) == MEMORY
    assert "batch.micro" in ADVICE[MEMORY]


def test_a_lost_rank_as_mpi_tells_it() -> None:
    mpi = pytest.importorskip("mpi4py.MPI", exc_type=ImportError)
    assert code_of(mpi.Exception(mpi.ERR_OTHER)) == LOST


@needs_horovod
def test_a_lost_rank_as_horovod_tells_it() -> None:
    error = importlib.import_module("horovod.common.exceptions").HorovodInternalError
    assert code_of(error("Connection closed by peer")) == LOST
    assert code_of(error("Mismatched allreduce tensor shapes")) == BUG, "ranks that call different collectives are our bug"


def test_the_rest_is_a_bug() -> None:
    assert code_of(ValueError("x")) == code_of(RuntimeError("mat1 and mat2 shapes")) == code_of(SystemExit(0)) == BUG


def test_the_readme_has_the_same_table() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| (.+) \|$", README.read_text(), re.MULTILINE))
    assert rows == {str(code): meaning for code, meaning in MEANINGS.items()}
