"""hvd.elastic: after the loss of a rank the others return to the last commit and continue;
ElasticSampler divides what is left."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import ranks
from ports import free_port
from ranks import FULL, Job, needs_mpirun


def finish(engine: str, out: Path, who: int) -> None:
    """Three ranks: by mpirun with ULFM, or as processes that nothing ends when another one does."""
    argv = ["tests/support/horovod_elastic.py", str(out), str(who)]
    if engine == "mpi":
        with Job(
            3, argv, options=["--with-ft", "ulfm"], env={"HVDTRAIN_ENGINE": "mpi"}, is_warm=True
        ) as job:
            job.wait()
        return
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "HVDTRAIN_SECRET": "of the test",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
    }
    shared["HVDTRAIN_ENGINE"] = engine
    with contextlib.ExitStack() as stack:
        each = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(3)]
        jobs = [stack.enter_context(Job(0, argv, env=env, is_warm=True)) for env in each]
        for job in jobs:
            job.wait()


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "who"), [("mpi", 1), ("torchdist", 0), *[("mpi", 0), ("torchdist", 1)] * FULL]
)
def test_the_others_go_on_from_the_last_commit(engine: str, who: int, tmp_path: Path) -> None:
    finish(engine, tmp_path / "out.json", who)
    row = json.loads((tmp_path / "out.json").read_text())
    assert row["size"] == 2 and row["resets"] == [2]
    for found in row["found"]:
        assert found == pytest.approx(row["expected"][0], rel=1e-12)


SAMPLER = """
import hvdtrain.horovod as hvd
hvd.init()
sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
print(list(sampler), len(sampler))
sampler.record_batch(0, 4)
other = hvd.elastic.ElasticSampler(range(10), shuffle=False)
other.load_state_dict(sampler.state_dict())
print(list(other))
sampler.set_epoch(1)
print(len(sampler), sampler.state_dict())
"""


def test_sampler_begins_after_the_samples_that_were_had() -> None:
    result = ranks.python(["-c", SAMPLER], env={"HVDTRAIN_ENGINE": "single"})
    lines = [
        "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9] 10",
        "[4, 5, 6, 7, 8, 9]",
        "10 {'epoch': 1, 'processed_num': 0}",
    ]
    assert result.stdout.splitlines() == lines, result.stderr
