"""Legal programs at the edges: threads, shared names, removed process sets, every dtype, bits; and
init() after one that failed."""

from __future__ import annotations

import pytest
import ranks
from ranks import needs_mpirun


@pytest.mark.in_turn
@needs_mpirun
@pytest.mark.parametrize(
    "engine", ["mpi", *[pytest.param("torchdist", marks=pytest.mark.slow)] * ranks.FULL]
)
def test_what_horovod_allows_works_on_three_ranks(engine: str) -> None:
    result = ranks.mpirun(3, ["tests/support/horovod_edges.py"], env={"HVDTRAIN_ENGINE": engine})
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(result.stdout.split()) == ["0", "1", "2", "whole", "whole", "whole"]


AFTER_A_FAILED_INIT = """
import os
import hvdtrain.horovod as hvd
from hvdtrain.errors import UserError
os.environ["HVDTRAIN_ENGINE"] = "mpii"
try:
    hvd.init()
except UserError:
    os.environ["HVDTRAIN_ENGINE"] = "single"
hvd.init()
from hvdtrain.horovod.job import JOB
shutdown = JOB.shutdown
JOB.shutdown = lambda: (print("at exit"), shutdown())
"""


def test_the_end_of_the_program_shuts_down_what_a_second_init_began() -> None:
    result = ranks.python(["-c", AFTER_A_FAILED_INIT])
    assert (result.returncode, result.stdout) == (0, "at exit\n"), result.stderr
