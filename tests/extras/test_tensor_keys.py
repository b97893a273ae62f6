"""parallel.tensor and parallel.sequence: what excludes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import refusal_of_job

from hvdtrain.config.read import configure, to_yaml
from hvdtrain.config.sections.parallel import ParallelConfig
from hvdtrain.extras.tensor.keys import TensorKeys

# (the configuration, the engine, ranks, what the message says, the key that it names, how to fix
# it)
REFUSED = [
    ("parallel.sequence=true", "mpi", 2,
     "parallel.sequence=true divides positions over the ranks of a tensor group, but this is "
     "parallel.tensor=1", "parallel.sequence",
     "parallel.tensor=2, or parallel.sequence=false"),
    ("parallel.tensor=2", "mpi", 3, "parallel.tensor=2 does not divide the 3 ranks of the "
                                    "job", "parallel.tensor",
     "a multiple of 2 ranks, or another parallel.tensor"),
    ("parallel.tensor=2 "
     "comm.local_steps=2", "mpi", 2, "parallel.tensor=2 does not support "
                                     "comm.local_steps=2", "comm.local_steps",
     "leave comm.local_steps out, or parallel.tensor=1"),
    ("parallel.tensor=2 "
     "batch.size=1", "mpi", 4, "batch 1 does not split over 2 ranks: some would have no "
                               "sample", "batch.size",
     "2 or more, or fewer ranks"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "engine", "ranks", "what", "key", "fix"), REFUSED)
def test_what_is_refused(
    words: str, engine: str, ranks: int, what: str, key: str, fix: str
) -> None:
    found, where, how = refusal_of_job(words, engine, ranks)
    assert (found, where.partition(",")[0], how) == (what, key, fix)


def test_a_run_leaves_behind_what_says_nothing_without_its_mesh(tmp_path: Path) -> None:
    mesh = ["parallel.tensor=2", "parallel.sequence=true"]
    (tmp_path / "config.yaml").write_text(to_yaml(configure(None, mesh)))
    assert TensorKeys.of(configure(None, [f"resume={tmp_path}", "batch.size=16"])).sequence
    assert configure(None, [f"resume={tmp_path}", "parallel.tensor=1"]).parallel == ParallelConfig()
