"""parallel.pipeline and its options: what excludes them, and wrong values."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import needs_extra, of_this_copy
from refusals import refusal_of_job

from hvdtrain.config.read import configure, to_yaml
from hvdtrain.config.sections.parallel import ParallelConfig
from hvdtrain.errors import UserError
from hvdtrain.extras.pipeline.keys import PipelineKeys

# (the configuration, the engine, ranks, what the message says, the key that it names, how to fix
# it)
WITH_TENSOR = [
    ("parallel.pipeline=2 "
     "parallel.tensor=2", "mpi", 6, "parallel.pipeline=2 x parallel.tensor=2 does not divide the "
                                    "6 ranks of the job",
     "parallel.tensor", "a multiple of 4 ranks, or another parallel.tensor"),
] if of_this_copy(["parallel.tensor=2"]) else []  # fmt: skip
REFUSED = [
    *WITH_TENSOR,
    ("parallel.pipeline=2", "horovod", 2, "parallel.pipeline=2 needs sends between ranks, which "
    "the horovod engine does not support",
     "comm.engine", "comm.engine=mpi with the same mpirun, or comm.engine=torchdist"),
    ("parallel.pipeline=2 "
     "parallel.balance=3", "mpi", 2, "parallel.balance=[3] has 1 stage, but the "
     "pipeline has 2", "parallel.balance",
     "2 numbers of units: hvdtrain plan --pipeline shows them"),
    ("parallel.pipeline=2 "
     "parallel.balance=3,2,1", "mpi", 2, "parallel.balance=[3, 2, 1] has 3 stages, but the "
     "pipeline has 2",
     "parallel.balance", "2 numbers of units: hvdtrain plan --pipeline shows them"),
    ("parallel.pipeline=2 parallel.virtual=2", "mpi", 2,
     "parallel.schedule=1f1b has one stage on each rank, but parallel.virtual=2 asks for more",
     "parallel.virtual",
     "parallel.schedule=interleaved, or leave parallel.virtual out"),
    ("parallel.pipeline=2 parallel.schedule=interleaved parallel.virtual=1", "mpi", 2,
     "parallel.schedule=interleaved with parallel.virtual=1 has one stage on each rank, which is "
     "1f1b", "parallel.virtual",
     "parallel.virtual=2, or parallel.schedule=1f1b"),
    ("parallel.pipeline=2 parallel.micro_batches=4 batch.micro=8", "mpi", 2,
     "parallel.micro_batches=4 and batch.micro=8 both set how many micro-batches a step has",
     "batch.micro", "leave one of them out"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "engine", "ranks", "what", "key", "fix"), REFUSED)
def test_what_is_refused(
    words: str, engine: str, ranks: int, what: str, key: str, fix: str
) -> None:
    found, where, how = refusal_of_job(words, engine, ranks)
    assert (found, where.partition(",")[0], how) == (what, key, fix)


@pytest.mark.parametrize(
    ("word", "what", "fix"),
    [
        (
            "parallel.balance=0",
            "wrong value for parallel.balance: 0",
            "units of each stage, each 1 or more, as in 3,2",
        ),
        (
            "parallel.balance=3,0",
            "wrong value for parallel.balance: '3,0'",
            "units of each stage, each 1 or more, as in 3,2",
        ),
        (
            "parallel.balance=cost",
            "wrong value for parallel.balance: 'cost'",
            "parallel.balance takes operations, seconds, or the units",
        ),
    ],
)
def test_wrong_values(word: str, what: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        configure(None, [word])
    assert what in caught.value.what and "command line" in caught.value.where
    assert fix in caught.value.fix


@needs_extra("tensor")
def test_a_run_leaves_behind_what_says_nothing_without_its_mesh(tmp_path: Path) -> None:
    mesh = ["tensor=2", "pipeline=2", "sequence=true", "schedule=gpipe", "balance=1,2"]
    (tmp_path / "config.yaml").write_text(
        to_yaml(configure(None, [f"parallel.{word}" for word in mesh]))
    )
    assert configure(None, [f"resume={tmp_path}", "batch.size=16"]).parallel.divides_positions
    now = PipelineKeys.of(configure(None, [f"resume={tmp_path}", "parallel.tensor=1"]))
    assert (now.divides_positions, now.schedule, now.balance) == (False, "gpipe", [1, 2])
    assert (
        configure(None, [f"resume={tmp_path}", "parallel.tensor=1", "parallel.pipeline=1"]).parallel
        == ParallelConfig()
    )
