"""parallel.dense and parallel.dense_updates: what excludes them."""

from __future__ import annotations

import pytest
from ranks import of_this_copy
from refusals import refusal_of_job

# (the configuration, the engine, ranks, what the message says, the key that it names, how to fix
# it)
WITH_TENSOR = [
    ("parallel.dense=c parallel.tensor=2", "mpi", 2,
     "parallel.dense=c and parallel.tensor=2 both divide layers: parallel.dense over all "
     "ranks", "parallel.dense", "keep one of them"),
] if of_this_copy(["parallel.tensor=2"]) else []  # fmt: skip
REFUSED = [
    ("parallel.dense=a "
     "comm.op=adasum", "horovod", 2, "parallel.dense=a does not support comm.op=adasum", "comm.op",
     "leave comm.op out, or parallel.dense=none"),
    *WITH_TENSOR,
    ("parallel.dense=a parallel.dense_updates=2", "mpi", 2,
     "parallel.dense_updates=2 needs turns, but parallel.dense=a puts all samples "
     "into one", "parallel.dense_updates", "parallel.dense=c or b"),
    ("parallel.dense=b parallel.dense_updates=8 batch.size=7", "mpi", 2,
     "batch 7 does not split into the turns of parallel.dense_updates=8: some would have no "
     "sample", "parallel.dense_updates",
     "parallel.dense_updates=7 or fewer"),
    ("parallel.dense=c parallel.dense_updates=2 "
     "batch.micro=8", "mpi", 2, "parallel.dense_updates=2 does not support batch.micro=8",
     "batch.micro", "leave batch.micro out, or parallel.dense_updates=1"),
    ("model.name=mlp model.lora=['fc1'] parallel.dense=b", "mpi", 2,
     "model.lora does not support parallel.dense=b", "model.lora",
     "leave parallel.dense or model.lora out"),
    ("task.name=language data.pack=16 parallel.dense=a", "mpi", 2,
     "data.pack does not support parallel.dense=a: only models with plain tokens as input can be "
     "divided",
     "parallel.dense", "leave parallel.dense out, or data.pack"),
    ("task.name=language data.pad={'tokens':0} parallel.dense=a", "mpi", 2,
     "data.pad does not support parallel.dense=a: ranks exchange activations of one shape, but "
     "micro-batches have different lengths", "parallel.dense",
     "leave parallel.dense out; or pad all samples to one length in the data, and leave data.pad "
     "out"),
    ("guard.lost=shrink parallel.dense=a", "mpi", 2,
     "guard.lost=shrink cannot continue on fewer ranks with parallel.dense=a", "guard.lost",
     "guard.lost=restart, or without parallel.dense"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "engine", "ranks", "what", "key", "fix"), REFUSED)
def test_what_is_refused(
    words: str, engine: str, ranks: int, what: str, key: str, fix: str
) -> None:
    found, where, how = refusal_of_job(words, engine, ranks)
    assert (found, where.partition(",")[0], how) == (what, key, fix)
