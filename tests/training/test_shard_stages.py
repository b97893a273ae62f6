"""shard.stage=1, 2 and 3 give the losses, the evaluation and the state of one process with
everything, up to rounding."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from pool import alone, on_ranks
from ranks import (
    FULL,
    HIGHEST_STAGE,
    mpirun,
    needs_extra,
    needs_horovod,
    needs_mpirun,
    of_this_copy,
)
from rotation import rows_of_today
from same_curve import check_same
from shards_on_ranks import FEW, jobs_of

from hvdtrain.errors import STALLED

slow = pytest.mark.slow
# of what runs each day; the other rows have days of their own, and all of the few jobs
TODAY = (FEW[0], *rows_of_today(FEW[1:]))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], dict]:
    """The jobs of a choice of words, without shards on one process, when a test first asks for
    them."""
    return {}


def run(tmp: Path, engine: str, size: int, stages: str, *how: str) -> dict:
    env = (
        {
            "JAX_COMPILATION_CACHE_DIR": str(tmp / "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        if "jax" in how
        else {}
    )
    folder = tmp / f"{engine}-{size}-{stages}"
    folder.mkdir()
    return dict(
        on_ranks(
            engine,
            size,
            "shards_on_ranks:curves",
            str(folder),
            stages,
            *how,
            env=env,
            hosts=2 if "nodes" in how else 1,
        )[0]
    )


def reference(one_process: dict, tmp: Path, *how: str) -> dict:
    key = tuple(word for word in how if word != "nodes")
    if key not in one_process:
        one_process[key] = run(tmp, "single", 1, "0", *key)
    return dict(one_process[key])


@pytest.mark.parametrize(
    ("engine", "size", "stages", "how"),
    [
        pytest.param("mpi", 2, HIGHEST_STAGE[-1], TODAY, marks=needs_mpirun, id="mpi-2-few"),
        pytest.param("mpi", 3, "0,1,2", ("muon",), marks=[needs_mpirun, slow], id="mpi-3-muon"),
        pytest.param("mpi", 3, "2", ("few",), marks=[needs_mpirun, slow], id="mpi-3-few"),
        pytest.param(
            "mpi",
            4,
            "1,3",
            ("nodes", "few"),
            marks=[needs_mpirun, slow, pytest.mark.ranks4],
            id="mpi-2x2-few",
        ),
        pytest.param(
            "torchdist", 2, "1,3", ("few",), marks=[needs_mpirun, slow], id="torchdist-2-few"
        ),
        pytest.param(
            "mpi", 2, "1,2,3", ("jax", "few"), marks=[needs_mpirun, slow], id="jax-mpi-2-few"
        ),
        *(
            [
                pytest.param("single", 1, "1,2", ("muon",), marks=slow, id="single-1-muon"),
                pytest.param("mpi", 3, "1,2,3", (), marks=[needs_mpirun, slow], id="mpi-3-all"),
                pytest.param(
                    "mpi",
                    4,
                    "1,2,3",
                    ("nodes",),
                    marks=[needs_mpirun, slow, pytest.mark.ranks4],
                    id="mpi-2x2",
                ),
                pytest.param(
                    "torchdist", 2, "1,2,3", (), marks=[needs_mpirun, slow], id="torchdist-2"
                ),
                pytest.param(
                    "mpi", 3, "1,2,3", ("jax",), marks=[needs_mpirun, slow], id="jax-mpi-3"
                ),
                pytest.param(
                    "mpi", 2, "0,1,2", ("muon",), marks=[needs_mpirun, slow], id="mpi-2-muon"
                ),
                pytest.param(
                    "mpi",
                    4,
                    "0,1,2",
                    ("muon",),
                    marks=[needs_mpirun, slow, pytest.mark.ranks4],
                    id="mpi-4-muon",
                ),
                pytest.param(
                    "horovod",
                    2,
                    "1,2",
                    (),
                    marks=[needs_mpirun, needs_horovod, slow],
                    id="horovod-2",
                ),
                pytest.param("single", 1, "1,2,3", ("jax",), marks=slow, id="jax-single-1"),
                pytest.param(
                    "horovod",
                    2,
                    "1,2,3",
                    ("jax",),
                    marks=[needs_mpirun, needs_horovod, slow],
                    id="jax-horovod-2",
                ),
                pytest.param(
                    "mpi", 2, "1,2,3", ("jax",), marks=[needs_mpirun, slow], id="jax-mpi-2"
                ),
                pytest.param("single", 1, "1,2,3", (), marks=slow, id="single-1"),
                pytest.param("mpi", 2, "1,2,3", (), marks=[needs_mpirun, slow], id="mpi-2"),
                pytest.param(
                    "mpi",
                    4,
                    "1,2,3",
                    (),
                    marks=[needs_mpirun, slow, pytest.mark.ranks4],
                    id="mpi-4",
                ),
                pytest.param(
                    "torchdist", 3, "1,2,3", (), marks=[needs_mpirun, slow], id="torchdist-3"
                ),
                pytest.param(
                    "horovod",
                    3,
                    "1,2",
                    (),
                    marks=[needs_mpirun, needs_horovod, slow],
                    id="horovod-3",
                ),
                pytest.param(
                    "horovod",
                    4,
                    "1,2",
                    ("nodes",),
                    marks=[needs_mpirun, needs_horovod, slow, pytest.mark.ranks4],
                    id="horovod-2x2",
                ),
            ]
            if FULL
            else []
        ),
    ],
)
def test_every_stage_is_one_process(
    one_process: dict, tmp_path: Path, engine: str, size: int, stages: str, how: tuple[str, ...]
) -> None:
    stages = ",".join(
        stage for stage in stages.split(",") if of_this_copy([f"shard.stage={stage}"])
    )
    whole, found = reference(one_process, tmp_path, *how), run(tmp_path, engine, size, stages, *how)
    if averaged := found.pop("averaged", None):
        difference = np.array(averaged["losses"]) - np.array(whole[f"{FEW[0]}, stage 0"]["losses"])
        assert np.abs(difference).max() > 1e-3, (
            "a gradient that is averaged over ranks twice is noticed"
        )
    assert (averaged is None) == (engine != "mpi" or bool({"nodes", "muon"} & set(how)))
    noise_scales = found.pop("noise scales", {})
    for scales in noise_scales.values():
        assert (
            len(scales) == 6
            and np.isfinite(scales).any()
            and scales == pytest.approx(noise_scales["0"], rel=1e-9, nan_ok=True)
        )
    measures = bool(of_this_copy(["log.noise_scale=true"]))
    assert bool(noise_scales) == ("jax" in how and size > 1 and measures)
    for message in found.pop(
        "altered", {}
    ).values():  # of the copies of a part on the two hosts, the last rank's
        assert message.startswith("ranks differ after step 1: s.")
        assert f"/ rank {size - 1} on n2, against 1 equal rank" in message
    assert found.keys() == {
        f"{job}, stage {stage}"
        for stage in stages.split(",")
        for job in [*jobs_of(*how), *["files"] * ("jax" in how)]
    }
    for name, job in found.items():
        one = whole[f"{name.rpartition(',')[0]}, stage 0"]
        if name.startswith(
            "resnet"
        ):  # whose running statistics are those of each rank's own samples
            assert job["digests"] == 1 and job["val"]["count"] == one["val"]["count"], name
            continue
        if name.startswith("files"):
            assert job == one and len(job) == 2, name
            continue
        check_same(name, job, one)


@slow
@needs_mpirun
@needs_extra("fully_sharded")
def test_a_stall_is_reported_with_the_block_that_each_rank_is_in() -> None:
    result = mpirun(2, alone("shards_on_ranks:sleeping", "mpi"))
    assert result.returncode == STALLED, result.stderr
    assert "no progress for 8 s (guard.stall_s)" in result.stderr
    behind = re.search(
        r"behind:\n  rank 1 on .*, pid \d+: step, epoch 0, step 0, for \d+ s, .*, in the forward "
        r"pass of blocks\.1\n",
        result.stderr,
    )
    assert (
        behind
        and "waiting: rank 0 at step 0, epoch 0: step, forward pass of blocks.2\n" in result.stderr
    ), result.stderr
