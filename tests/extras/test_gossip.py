"""comm.gossip_steps: ranks in threads against workers in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from faults import Command, ends_as_straight, kill, kills
from numpy_workers import Worker, batch, check_equal, first_weights, mean, train
from ranks import needs_mpirun, of_this_copy
from refusals import refusal_of_job

from hvdtrain.core.arrays import Arrays
from hvdtrain.extras.gossip.ring import neighbours


def simulate(size: int, local_steps: int, gossip_steps: int, steps: int, syncs: set[int]) -> Arrays:
    workers = [Worker(first_weights()) for _ in range(size)]
    since = 0
    distances = [1, 2, 4, 8][: int(np.ceil(np.log2(size)))]
    for step in range(steps):
        since += 1
        for rank, worker in enumerate(workers):
            worker.local_step(batch(rank, step))
        if since == local_steps or step + 1 in syncs:
            weights = mean([worker.w for worker in workers])
            momentum = mean([worker.v for worker in workers])
            for worker in workers:
                worker.w = dict(weights)
                worker.v = dict(momentum)
            since = 0
        elif since % gossip_steps == 0:
            distance = distances[(since // gossip_steps - 1) % len(distances)]
            before = [worker.w for worker in workers]
            for rank, worker in enumerate(workers):
                worker.w = mean([before[rank], before[(rank - distance) % size]])
    return workers[0].state()


@pytest.mark.parametrize(
    ("size", "local_steps", "gossip_steps"), [(2, 4, 1), (4, 6, 1), (4, 6, 2), (3, 6, 2)]
)
def test_ranks_have_what_workers_in_numpy_have_also_resumed(
    size: int, local_steps: int, gossip_steps: int
) -> None:
    words = (
        f"comm.local_steps={local_steps}",
        f"log.every_steps={local_steps}",
        f"comm.gossip_steps={gossip_steps}",
    )
    syncs = (7, 12)
    straight = train(size, words, 12, syncs)
    check_equal(straight.state, simulate(size, local_steps, gossip_steps, 12, set(syncs)))
    without = train(size, words[:2], 12, syncs)
    assert np.abs(straight.state["p.fc1.weight"] - without.state["p.fc1.weight"]).max() > 1e-6
    resumed = train(size, words, 5, syncs, train(size, words, 7, syncs), first_step=7)
    for name, array in straight.state.items():
        np.testing.assert_array_equal(resumed.state[name], array, err_msg=name)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_whom_a_rank_sends_to_receives_from_it(size: int) -> None:
    turns = range(2 * size)
    for turn in turns:
        each = [neighbours(rank, size, turn) for rank in range(size)]
        assert all(each[one.to].source == rank != one.to for rank, one in enumerate(each))
    mixed = np.eye(size)
    for turn in range((size - 1).bit_length()):
        mixed = (mixed + mixed[[neighbours(rank, size, turn).source for rank in range(size)]]) / 2
    np.testing.assert_allclose(mixed.sum(axis=0), 1)
    assert np.allclose(mixed, 1 / size) == (size in (2, 4, 8)), "the mean after log2(size) turns"


def test_one_rank_has_no_neighbour() -> None:
    words = ("comm.local_steps=2", "log.every_steps=2", "comm.gossip_steps=1")
    worker = Worker(first_weights())
    for step in range(3):
        worker.local_step(batch(0, step))
    check_equal(train(1, words, 3, (3,)).state, worker.state())


WITH_DILOCO = [
    ("comm.gossip_steps=1 comm.local_steps=5 comm.outer_momentum=0.9", "mpi",
     "comm.gossip_steps=1 does not support comm.outer_momentum=0.9", "comm.outer_momentum",
     "leave comm.outer_momentum out, or comm.gossip_steps=0"),
] if of_this_copy(["comm.outer_momentum=0.9"]) else []  # fmt: skip


@pytest.mark.parametrize(
    ("words", "engine", "what", "key", "fix"),
    [
        (
            "comm.gossip_steps=2",
            "mpi",
            "comm.gossip_steps=2 has no effect without comm.local_steps",
            "comm.gossip_steps",
            "comm.local_steps=100, after which all ranks average, or leave comm.gossip_steps out",
        ),
        (
            "comm.gossip_steps=5 comm.local_steps=5",
            "mpi",
            "comm.gossip_steps=5 has no effect with comm.local_steps=5: all ranks average first",
            "comm.gossip_steps",
            "more comm.local_steps, or fewer comm.gossip_steps",
        ),
        (
            "comm.gossip_steps=1 comm.local_steps=5",
            "horovod",
            "comm.gossip_steps=1 needs sends between ranks, which the horovod engine does not "
            "support",
            "comm.engine",
            "comm.engine=mpi with the same mpirun, or comm.engine=torchdist",
        ),
        *WITH_DILOCO,
    ],
)
def test_what_is_refused(words: str, engine: str, what: str, key: str, fix: str) -> None:
    found, where, how = refusal_of_job(words, engine, 2)
    assert (found, where.partition(",")[0], how) == (what, key, fix)


@pytest.mark.faults
@pytest.mark.ranks4
@needs_mpirun
def test_three_kills_at_random_moments_do_not_change_the_result(tmp_path: Path) -> None:
    """Of rank 0, of mpirun and of another rank; then the job ends as one that never stopped."""
    words = (
        "model.name=mlp",
        "model.widths=[9,7]",
        "comm.local_steps=10",
        "comm.gossip_steps=2",
    )
    command = Command("mpi", 4, words)
    trials = [kill(command, tmp_path / "run", what) for what in kills(56, command.size, 3)]
    assert len(trials) == 3 and ends_as_straight(command, tmp_path / "run")
