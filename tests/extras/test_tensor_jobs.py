"""Ranks that have one model together give the losses, the evaluation, the state and the files of
one process, up to rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from parallel_on_ranks import DROPPED, files_on, jobs_on
from pool import on_ranks
from ranks import FULL, HIGHEST_STAGE, needs_horovod, needs_mpirun, of_this_copy
from same_curve import check_same

from hvdtrain.config.read import configure
from hvdtrain.extras.divided.features import mesh_lines
from hvdtrain.extras.tensor.features import TENSOR

slow = pytest.mark.slow
FOUR = [
    "parallel.tensor=2",
    "parallel.tensor=2,shard.stage=1",
    "parallel.tensor=4,shard.stage=2",
    f"parallel.tensor=2,{HIGHEST_STAGE}",
]
POSITIONS = [f"{mesh},parallel.sequence=true" for mesh in FOUR]
# buckets so small that there are several, which are cut elsewhere on ranks with one token more
STAGES = [
    "parallel.tensor=2,shard.stage=1,comm.bucket_mb=0.004,parallel.sequence=true",
    *of_this_copy(["parallel.pipeline=2,parallel.tensor=2,parallel.sequence=true"]),
]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """A job's name -> its results without parts."""
    found = on_ranks(
        "single",
        1,
        "parallel_on_ranks:curves",
        "single",
        str(tmp_path_factory.mktemp("one")),
        [],
        not FULL,
    )[0]
    return {name.partition(" / ")[0]: job for name, job in found.items()}


@needs_mpirun
@pytest.mark.parametrize(
    ("engine", "size", "meshes", "few"),
    [
        pytest.param("mpi", 2, [FOUR[3], POSITIONS[3]], not FULL, marks=slow, id="mpi-2-all"),
        pytest.param("mpi", 4, STAGES, True, marks=[slow, pytest.mark.ranks4], id="mpi-4-stages"),
        *[
            pytest.param("mpi", 2, FOUR[:1], True, marks=slow, id="mpi-2"),
            pytest.param("mpi", 4, FOUR, True, marks=[slow, pytest.mark.ranks4], id="mpi-4"),
            pytest.param(
                "mpi",
                4,
                [*POSITIONS[2:], *STAGES],
                True,
                marks=[slow, pytest.mark.ranks4],
                id="mpi-4-positions",
            ),
            pytest.param(
                "torchdist", 2, [FOUR[0], POSITIONS[0]], True, marks=slow, id="torchdist-2"
            ),
            pytest.param(
                "torchdist",
                4,
                [FOUR[0], FOUR[3], POSITIONS[0]],
                True,
                marks=[slow, pytest.mark.ranks4],
                id="torchdist-4",
            ),
            pytest.param(
                "horovod",
                2,
                [FOUR[0], POSITIONS[0]],
                True,
                marks=[slow, needs_horovod],
                id="horovod-2",
            ),
        ]
        * FULL,
    ],
)
def test_every_mesh_is_one_process(
    one_process: dict, tmp_path: Path, engine: str, size: int, meshes: list[str], few: bool
) -> None:
    found = on_ranks(engine, size, "parallel_on_ranks:curves", engine, str(tmp_path), meshes, few)[
        0
    ]
    if size == 2 and engine == "mpi":
        refused = found.pop("refused")
        assert (
            "HalfAPlan, divided by its tensor_plan(), fails: RuntimeError: mat1 and mat2"
            in refused["HalfAPlan"]
        )
        assert (
            "CutOutputs, divided by its tensor_plan(), returns other outputs than the whole model"
            in refused["CutOutputs"]
        )
        difference = np.array(found.pop("unsummed")["losses"]) - np.array(
            one_process["gpt, tied, recomputed"]["losses"]
        )
        assert np.abs(difference).max() > 1e-3, "a sum over tensor ranks that is missing is noticed"
    if size == 2 and meshes[-1] in POSITIONS and engine == "mpi":
        summed, unsummed = map(np.array, found.pop("positions"))
        assert np.abs(summed - unsummed).max() > 1e-3, (
            "gradients of positions that are not added up are noticed"
        )
        check_masks(found.pop("masks"))
    assert found.keys() == {
        f"{job} / {mesh}" for mesh in meshes for job in (*jobs_on(mesh, few), *files_on(mesh))
    }
    for name, job in found.items():
        one = one_process[name.partition(" / ")[0]]
        if name.startswith("files"):
            assert job == one and len(job) == 2, name
            continue
        check_same(name, job, one)


def check_masks(masks: dict) -> None:
    """Each rank drops others of its positions, and scales what it keeps."""
    assert len(set(masks["digests"])) == 2, masks
    values = 4 * 32 * 24  # of a micro-batch at half of 64 positions
    assert masks["shares"] == pytest.approx(
        [DROPPED] * 2, abs=5 * (DROPPED * (1 - DROPPED) / values) ** 0.5
    )
    assert masks["scales"] == pytest.approx([1 / (1 - DROPPED)] * 2)


def test_the_picture_of_a_mesh() -> None:
    parallel = configure(None, ["parallel.tensor=2"]).parallel
    assert mesh_lines(parallel, ["n1", "n1", "n2", "n2"]) == [
        "mesh    2 data x 2 tensor",
        "                  tensor 0  tensor 1",
        "        data 0    0 on n1   1 on n1",
        "        data 1    2 on n2   3 on n2",
    ]
    assert "a tensor group is on several hosts" in "".join(mesh_lines(parallel, ["n1", "n2"]))
    assert TENSOR.ranks_lines(configure(None, []), ["n1", "n1"]) == ()
