"""comm.compression_rank: ranks in threads against workers in NumPy, resumed on as many ranks and on
others; one process computes the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from faults import Command, ends_as_straight, kill, kills
from numpy_workers import NAMES, Worker, batch, check_equal, first_weights, train
from pool import on_ranks
from ranks import FULL, needs_horovod, needs_mpirun
from refusals import refusal_of_job

from hvdtrain.core.arrays import Arrays, Batch
from hvdtrain.errors import UserError

RANK = 2
WORDS = (f"comm.compression_rank={RANK}", "log.every_steps=4")
COMPRESSED = ("fc1.weight", "fc2.weight")  # P and Q of head.weight would have 16 numbers, it has 15


def orthonormal(p: np.ndarray) -> np.ndarray:
    """Gram-Schmidt, as in the paper; twice, for its rounding."""
    p = p.copy()
    for i in range(p.shape[1]):
        for _ in range(2):
            for j in range(i):
                p[:, i] -= p[:, j] * (p[:, j] @ p[:, i])
        p[:, i] /= np.linalg.norm(p[:, i])
    return p


def simulate(size: int, steps: int, first_q: Arrays) -> Arrays:
    """One set of weights, a residual for each rank."""
    model = Worker(first_weights())
    q = dict(first_q)
    e = {name: np.zeros((size, *model.w[name].shape)) for name in COMPRESSED}
    for step in range(steps):
        samples = [batch(rank, step) for rank in range(size)]
        total = sum(len(each["y"]) for each in samples)
        each = [model.gradient(one, total) for one in samples]
        found = {}
        for name in NAMES:
            m = np.array([gradient[name] for gradient in each])
            if name not in COMPRESSED:
                found[name] = m.sum(axis=0)
                continue
            m = m + e[name]
            p = orthonormal(sum(one @ q[name] for one in m))
            shares = [one.T @ p for one in m]
            q[name] = np.asarray(sum(shares))
            e[name] = np.array([one - p @ share.T for one, share in zip(m, shares, strict=True)])
            found[name] = p @ q[name].T
        model.step(found)
    return model.state() | {f"s.{name}@residual": e[name] for name in COMPRESSED}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_have_what_workers_in_numpy_have_also_resumed(size: int) -> None:
    first = train(size, WORDS, 0, ()).state
    first_q = {name: first[f"s.{name}@q"] for name in COMPRESSED}
    assert [first_q[name].shape for name in COMPRESSED] == [(32, RANK), (7, RANK)]
    straight = train(size, WORDS, 9, (4, 9))
    expected = simulate(size, 9, first_q)
    check_equal(straight.state, expected)
    assert {name for name in straight.state if "residual" in name} <= expected.keys()
    assert np.abs(expected["s.fc1.weight@residual"]).max() > 1e-3
    resumed = train(size, WORDS, 5, (9,), train(size, WORDS, 4, (4,)), first_step=4)
    for name, array in straight.state.items():
        np.testing.assert_array_equal(resumed.state[name], array, err_msg=name)
    assert "gradients of 2 matrices at rank 2 or less: 132 of 289 numbers" in straight.summary


def test_other_ranks_continue_with_the_numbers_of_an_uninterrupted_job() -> None:
    """The residuals of four ranks become those of two, which then read the samples of two each."""

    def of_two(rank: int, step: int) -> Batch:
        pair = [batch(2 * rank + i, step) for i in range(2)]
        return {name: np.concatenate([each[name] for each in pair]) for name in pair[0]}

    straight = train(4, WORDS, 9, (4, 9))
    half = train(4, WORDS, 4, (4,))
    resumed = train(2, WORDS, 5, (9,), half, first_step=4, samples=of_two)
    shared = {
        name: array
        for name, array in straight.state.items()
        if name.startswith("p.") or name.endswith(".0")
    }
    check_equal(resumed.state, shared)
    for name in COMPRESSED:
        check_equal(
            {"sum": resumed.state[f"s.{name}@residual"].sum(axis=0)},
            {"sum": straight.state[f"s.{name}@residual"].sum(axis=0)},
        )
    assert resumed.notes == [
        "the checkpoint has s.fc1.weight@residual and 1 more of 4 ranks; each of the 2 ranks "
        "starts with an equal share of their sum"
    ]


ENGINES = [
    pytest.param("mpi", marks=needs_mpirun),
    *[
        pytest.param("horovod", marks=[needs_mpirun, needs_horovod]),
        pytest.param("torchdist", marks=needs_mpirun),
    ]
    * FULL,
]


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_of_an_engine_have_the_losses_of_one_process(engine: str) -> None:
    words = (
        "model.name=mlp model.widths=[24,16] optim.base_lr=0.05 max_steps=24 "
        f"comm.compression_rank={RANK}"
    )
    one = on_ranks("single", 1, "invariance:curve", words)[0]
    found = on_ranks(engine, 2, "invariance:curve", words)[0]
    np.testing.assert_allclose(found["losses"], one["losses"], rtol=1e-11)
    assert found["val"] == pytest.approx(one["val"], rel=1e-11)
    assert found["digests"] == 1 and found["losses"][-1] < found["losses"][0]


def test_a_state_of_another_rank_of_compression_does_not_fit() -> None:
    half = train(2, WORDS, 1, (1,))
    with pytest.raises(UserError) as caught:
        train(2, ("comm.compression_rank=1",), 0, (), half)
    assert caught.value.what == "the state lacks s.head.weight@q and 1 more"


@pytest.mark.parametrize(
    ("words", "what", "key", "fix"),
    [
        (
            "comm.compression=fp16",
            "comm.compression_rank=2 does not support comm.compression=fp16",
            "comm.compression",
            "leave comm.compression out, or comm.compression_rank=0",
        ),
        (
            "comm.local_steps=2 log.every_steps=2",
            "comm.compression_rank=2 does not support comm.local_steps=2",
            "comm.local_steps",
            "leave comm.local_steps out, or comm.compression_rank=0",
        ),
        (
            "speed.precision=fp16",
            "comm.compression_rank=2 keeps part of a gradient for the next step, but "
            "speed.precision=fp16 may change the scale of the loss in between",
            "comm.compression_rank",
            "speed.precision=bf16, or comm.compression_rank=0",
        ),
        (
            "guard.nonfinite=skip",
            "comm.compression_rank=2 keeps part of a gradient for the next step, so "
            "guard.nonfinite=skip could not skip it",
            "comm.compression_rank",
            "guard.nonfinite=stop or rollback, or comm.compression_rank=0",
        ),
        (
            "log.noise_scale=true",
            "log.noise_scale compares each rank's gradient with their mean, which "
            "comm.compression_rank=2 does not compute",
            "comm.compression_rank",
            "comm.compression_rank=0, or log.noise_scale=false",
        ),
        (
            "framework=numpy model.name=linear",
            "framework=numpy does not support comm.compression_rank=2",
            "comm.compression_rank",
            "comm.compression_rank=0, or framework=torch",
        ),
        (
            "guard.lost=shrink",
            "guard.lost=shrink cannot continue on fewer ranks with comm.compression_rank=2",
            "guard.lost",
            "guard.lost=restart, or without comm.compression_rank",
        ),
    ],
)
def test_what_is_refused(words: str, what: str, key: str, fix: str) -> None:
    found, where, how = refusal_of_job(f"comm.compression_rank=2 {words}", "mpi", 2)
    assert (found, where.partition(",")[0], how) == (what, key, fix)


@pytest.mark.faults
@needs_mpirun
def test_three_kills_at_random_moments_do_not_change_the_result(tmp_path: Path) -> None:
    """Of rank 0, of mpirun and of another rank; then the job ends as one that never stopped."""
    words = (
        "model.name=mlp",
        "model.widths=[9,7]",
        "comm.compression_rank=2",
    )
    command = Command("mpi", 2, words)
    trials = [kill(command, tmp_path / "run", what) for what in kills(56, command.size, 3)]
    assert len(trials) == 3 and ends_as_straight(command, tmp_path / "run")
