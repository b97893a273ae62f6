"""Jobs of ranks that divide the positions of their samples give the losses, evaluations and weights
of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import context_parallel_on_ranks
import numpy as np
import packing_jobs
import pool
import pytest
from pool import on_ranks
from ranks import FULL, HIGHEST_STAGE, mpirun, needs_extra, needs_mpirun, of_this_copy
from same_curve import check_same

from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import SingleProcessCommunicator

NAMES = list(context_parallel_on_ranks.JOBS)
OF_GPT = NAMES[:-1]
ULYSSES = "parallel.context_by=ulysses"
MESHES = [
    "parallel.context=2 parallel.tensor=2 parallel.sequence=true",
    f"parallel.context=2 parallel.tensor=2 shard.stage=1 {ULYSSES}",
    "parallel.context=2 parallel.pipeline=2",
    "parallel.context=2 parallel.tensor=2",
    f"parallel.context=2 parallel.pipeline=2 shard.stage=2 {ULYSSES}",
    "parallel.context=2 parallel.pipeline=2 parallel.schedule=gpipe",
]
CASES = [
    (2, "parallel.context=2"),
    (4, "parallel.context=2 shard.stage=1"),
    (4, f"parallel.context=4 {ULYSSES}"),
    *[(4, words) for words in of_this_copy(MESHES[: None if FULL else 3])],
    *[
        (2, "parallel.context=2 shard.stage=2"),
        (4, "parallel.context=4"),
        (4, f"parallel.context=2 {ULYSSES} shard.stage=1 shard.group=node"),
    ]
    * FULL,
]


# of them, those that a model runs whose keys have one head, and which only has a context_plan()
OF_ALL = [words for _, words in CASES if words not in MESHES and ULYSSES not in words]


@pytest.fixture(scope="module")
def one_process() -> dict[str, dict[str, Any]]:
    communicator = SingleProcessCommunicator()
    return context_parallel_on_ranks.curves(communicator, NAMES, "", of_threads=True)


@pytest.mark.parametrize(("size", "options"), CASES)
def test_losses_are_those_of_one_process(
    one_process: dict[str, dict[str, Any]], size: int, options: str
) -> None:
    # the keys of the last one have one head, and it has no other plan
    names = NAMES if options in OF_ALL else OF_GPT
    found = context_parallel_on_ranks.curves_on_threads(size, names, options)
    for name in names:
        check_same(f"{name} / {options}", found[name], one_process[name])


def test_gradients_that_do_not_return_are_noticed(one_process: dict[str, dict[str, Any]]) -> None:
    found = context_parallel_on_ranks.curves_on_threads(
        2, NAMES[:1], "parallel.context=2", loses="gradients"
    )
    difference = np.array(found[NAMES[0]]["losses"]) - one_process[NAMES[0]]["losses"]
    assert np.abs(difference).max() > 1e-4


@pytest.mark.parametrize("by", ["ring", "ulysses"])
def test_ranks_with_other_layers_are_named(by: str) -> None:
    expected = (
        "ranks use different layers (rank 0: forward pass of blocks.1.attention; rank 1: end of "
        "the forward pass)"
    )
    for error in context_parallel_on_ranks.layers_that_differ(by):
        assert expected in error and "the same layers on every rank that has positions" in error


def test_attention_under_autocast_has_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch casts queries, keys and values. The model is compared for more positions than
    CHECKED, if there are many ranks."""
    monkeypatch.setattr("hvdtrain.extras.context_parallel.arrangement.CHECKED", 2)
    job = f"{context_parallel_on_ranks.DATA} {MODELS}:OfTwoTypes speed.precision=bf16"
    monkeypatch.setitem(context_parallel_on_ranks.JOBS, "types", job)
    one = context_parallel_on_ranks.curves(
        SingleProcessCommunicator(), ["types"], "", of_threads=True
    )
    found = context_parallel_on_ranks.curves_on_threads(2, ["types"], "parallel.context=2")
    np.testing.assert_allclose(found["types"]["losses"], one["types"]["losses"], rtol=0.01)


MODELS = "model.name=context_parallel_on_ranks"
REFUSED = [
    (f"{MODELS}:NoPlan", "NoPlan has no context_plan(), which names its attention"),
    (f"{MODELS}:NoSuchModule", "'block.*' names no module"),
    (f"{MODELS}:NoSuchWay", "attention: 'rows' is not known"),
    (f"{MODELS}:OnlyPositions", "context_plan() of OnlyPositions names no attention"),
    (f"{MODELS}:Unnamed", "a module other than head calls scaled_dot_product_attention()"),
    (
        f"{MODELS}:NoPositions",
        "NoPositions, divided by its context_plan(), returns other outputs than the whole model",
    ),
    (
        f"{MODELS}:ByMatrices",
        "attention of ByMatrices, a Products, does not call "
        "torch.nn.functional.scaled_dot_product_attention()",
    ),
    (f"{MODELS}:Normed", "norm of Normed is a BatchNorm1d, whose statistics would only include"),
    (
        f"{MODELS}:OfFixedLength",
        "OfFixedLength, divided by its context_plan(), fails for the positions of a rank: "
        "RuntimeError: shape '[-1, 9]' is invalid",
    ),
    (f"{MODELS}:WithMask", "attention passes a mask to scaled_dot_product_attention(), which"),
    (
        f"{context_parallel_on_ranks.GPT} data.side=1",
        "samples of 1 positions do not divide among 2 ranks, which have two chunks each",
    ),
    (
        f"{context_parallel_on_ranks.GPT} model.heads=3 {ULYSSES}",
        "blocks.0.attention has 3 heads, which 2 ranks do not divide evenly",
    ),
]


def test_what_cannot_be_divided_is_named() -> None:
    found = context_parallel_on_ranks.refusals_on_threads([words for words, _ in REFUSED])
    for message, (words, expected) in zip(found, REFUSED, strict=True):
        assert expected in message and "fix:" in message, (words, message)


@needs_mpirun
@pytest.mark.slow
def test_jobs_on_engines_are_one_process() -> None:
    names = ["gpt, tied, recomputed", "gpt, empty shares"]
    one = context_parallel_on_ranks.curves(SingleProcessCommunicator(), names, "")
    cases = [
        ("mpi", f"parallel.context=2 {HIGHEST_STAGE}"),
        *[
            ("mpi", f"parallel.context=2 {ULYSSES}"),
            ("torchdist", "parallel.context=2"),
            ("torchdist", f"parallel.context=2 {ULYSSES} {HIGHEST_STAGE}"),
        ]
        * FULL,
    ]
    for engine, options in cases:
        found = on_ranks(engine, 2, "context_parallel_on_ranks:curves", names, options)[0]
        for name in names:
            check_same(f"{name} / {engine} {options}", found[name], one[name])


@needs_mpirun
@pytest.mark.slow
def test_packed_rows_and_resumed_jobs_have_the_weights_of_each_sequence_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_two = [
        "ring parallel.context=2",
        f"ulysses parallel.context=2 {ULYSSES} shard.stage=2",
        f"stage-3 parallel.context=2 {HIGHEST_STAGE} model.recompute=all",
    ]
    # without a name: resumes
    on_four = ["four parallel.context=2 shard.stage=1", "resumed parallel.context=2 stop.steps=3"]
    on_four += [" parallel.context=4 stop.steps=6"]
    for size, ways in {2: on_two, 4: on_four}.items():
        done = mpirun(
            size, pool.alone("context_parallel_on_ranks:packed_on_ranks", str(tmp_path), *ways)
        )
        assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.chdir(tmp_path)
    names = ("ring", "ulysses", "stage-3", "four")
    found = {name: dict(np.load(f"{name}.npz")) for name in names}
    found["resumed"] = context_parallel_on_ranks.packed(
        "resumed", "parallel.context=1", resumes=True
    )
    expected = packing_jobs.packed_by_hand()
    for name, weights in found.items():
        for key, array in expected.items():
            np.testing.assert_allclose(
                weights[key], array, rtol=0, atol=1e-12, err_msg=f"{name} {key}"
            )


MESHES_OF_RESUMED = of_this_copy(
    [
        "parallel.context=2 parallel.tensor=2 stop.steps=2 shard.stage=3",
        f"parallel.context=2 parallel.pipeline=2 parallel.tensor=1 shard.stage=1 stop.steps=4 "
        f"log.samples=0 {ULYSSES}",
        "parallel.context=4 parallel.pipeline=1 parallel.context_by=ring stop.steps=6 "
        "log.samples=2",
    ]
)


@needs_mpirun
@pytest.mark.slow
@pytest.mark.ranks4
@needs_extra("sample")
@pytest.mark.skipif(len(MESHES_OF_RESUMED) < 3, reason="this copy lacks tensor or pipeline")
def test_a_job_that_continues_on_other_meshes_is_that_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights are, and so are the texts that it draws, and those of `sample`."""
    program = pool.alone(
        "context_parallel_on_ranks:resumed_on_ranks", str(tmp_path), "meshes", *MESHES_OF_RESUMED
    )
    done = mpirun(4, program)
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.chdir(tmp_path)
    expected = context_parallel_on_ranks.trained("one")
    found = np.load("meshes.npz")
    for key, array in expected.items():
        np.testing.assert_allclose(found[key], array, rtol=0, atol=1e-12, err_msg=key)
    drawn = [Path(run, "samples", "step-00000006.txt").read_text() for run in ("meshes", "one")]
    assert drawn[0] == drawn[1]
    capsys.readouterr()
    for run in ("meshes", "one"):
        assert main(["sample", run, "--count", "2", "--length", "9"]) == 0
        drawn.append(capsys.readouterr().out.replace(run, "run"))
    assert drawn[2] == drawn[3] and len(drawn[2]) > 18
