"""parallel.context and parallel.context_by: what excludes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import needs_extra
from refusals import refusal_of_job

from hvdtrain.comm.mesh import place_of
from hvdtrain.config.read import configure, to_yaml
from hvdtrain.config.sections.parallel import ParallelConfig
from hvdtrain.extras.context_parallel.features import CONTEXT
from hvdtrain.extras.divided.features import mesh_lines

LANGUAGE = "parallel.context=2 task.name=language"
# (the configuration, the engine, ranks, what the message says, the key that it names, how to fix
# it)
REFUSED = [
    (LANGUAGE, "mpi", 3, "parallel.context=2 does not divide the 3 ranks of the job",
     "parallel.context", "a multiple of 2 ranks, or another parallel.context"),
    ("parallel.context=2 task.name=regression", "mpi", 2,
     "parallel.context=2 divides sequences of task.name=language, but this is "
     "task.name=regression", "parallel.context",
     "task.name=language, or parallel.context=1"),
    (LANGUAGE, "horovod", 2,
     "parallel.context=2 needs sends between ranks, which the horovod engine does not support",
     "comm.engine", "comm.engine=mpi with the same mpirun, or comm.engine=torchdist"),
    (f"{LANGUAGE} comm.local_steps=2", "mpi", 2,
     "parallel.context=2 does not support comm.local_steps=2", "comm.local_steps",
     "leave comm.local_steps out, or parallel.context=1"),
    (f"{LANGUAGE} batch.size=1", "mpi", 4,
     "batch 1 does not split over 2 ranks: some would have no sample", "batch.size",
     "2 or more, or fewer ranks"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "engine", "ranks", "what", "key", "fix"), REFUSED)
def test_what_is_refused(
    words: str, engine: str, ranks: int, what: str, key: str, fix: str
) -> None:
    found, where, how = refusal_of_job(words, engine, ranks)
    assert (found, where.partition(",")[0], how) == (what, key, fix)


def test_a_run_leaves_behind_what_says_nothing_without_it(tmp_path: Path) -> None:
    keys = ["parallel.context=2", "parallel.context_by=ulysses"]
    (tmp_path / "config.yaml").write_text(to_yaml(configure(None, keys)))
    assert configure(None, [f"resume={tmp_path}", "parallel.context=1"]).parallel == (
        ParallelConfig()
    )


def test_the_lines_of_the_header() -> None:
    config = configure(None, ["parallel.context=2"])
    assert CONTEXT.ranks_lines(config, ["n1", "n1", "n2", "n2"]) == [
        "mesh    2 data x 2 context, which divide the positions of each sample (ring)"
    ]
    assert "are on several hosts" in CONTEXT.ranks_lines(config, ["n1", "n2"])[1]
    assert [place_of(rank, 4, config.parallel) for rank in (1, 2)] == [
        "data 0, context 1",
        "data 1, context 0",
    ]


@needs_extra("report")
@needs_extra("tensor")
def test_a_report_names_positions_beside_the_mesh() -> None:
    """The event "start" has the axes over which layers are divided."""
    from hvdtrain.extras.report.measures.mesh import ways

    start = {
        "mesh": {"pipeline": 1, "data": 2, "tensor": 2},
        "coordinates_of_rank": [[0, data, tensor] for data in (0, 1) for tensor in (0, 1)],
    }
    config = {"parallel.tensor": 2, "parallel.context": 2, "shard.stage": 1}
    run: Any = SimpleNamespace(ranks=4, start_event=start, config=config)
    assert ways(run) == "2 data x 2 tensor, parallel.context=2, shard.stage=1"


@needs_extra("tensor")
def test_the_mesh_with_parts_of_layers() -> None:
    config = configure(None, ["parallel.context=2", "parallel.tensor=2"])
    hosts = ["n1", "n1", "n2", "n2"]
    assert mesh_lines(config.parallel, hosts) == [
        "mesh    1 data x 2 context x 2 tensor",
        "                           tensor 0  tensor 1",
        "        data 0, context 0  0 on n1   1 on n1",
        "        data 0, context 1  2 on n2   3 on n2",
    ]
    context, apart = CONTEXT.ranks_lines(config, hosts)
    assert context == "context 2 ranks divide the positions of each sample (ring)"
    assert "are on several hosts" in apart
    assert len(CONTEXT.ranks_lines(config, ["n1", "n2", "n1", "n2"])) == 1
    assert place_of(3, 4, config.parallel) == "data 0, context 1, tensor 1"
    found = refusal_of_job("parallel.context=2 parallel.tensor=2 task.name=language", "mpi", 2)
    assert found[0] == (
        "parallel.tensor=2 x 2 ranks of a sample does not divide the 2 ranks of the job"
    )
