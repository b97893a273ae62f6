"""guard.lost=shrink with parameter servers: the others go on without a worker, of an asynchronous
job with every update that was made; without a server the job ends, and can be started again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import events
from lost_ranks import (
    SYNC_EVERY,
    arguments,
    difference,
    finish,
    losses_of_ranks,
    outcome,
    undisturbed,
)
from ranks import FULL, needs_mpirun, python

from hvdtrain.errors import DONE, LOST
from hvdtrain.extras.servers.update_log import read_updates

pytestmark = [pytest.mark.faults, needs_mpirun]
LOGGED = (
    "servers.log=true optim.name=lamb optim.clip_norm=0.5 model.dropout=0.2 log.every_steps=9 "
    "checkpoint.every_steps=9"
)


@pytest.mark.ranks4
@pytest.mark.parametrize(
    ("servers", "words", "plan", "lost"),
    [
        *[(2, "optim.name=lamb", "3 learner.py:step 8", {3})] * FULL,
        (1, "", "2 loop.py:evaluate 2, 1 memory_copy.py:restore 1", {1, 2}),
    ],
)
def test_a_worker_of_a_synchronous_job_is_lost(
    servers: int, words: str, plan: str, lost: set[int], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    argv = arguments(
        "servers", run, f"guard.lost=shrink servers.count={servers} servers.bound=0 {words}", plan
    )
    (result,) = finish("mpi", 4, argv)
    assert result.returncode == DONE, result
    found = losses_of_ranks(run)
    assert {rank for event in found for rank in event["ranks"]} == lost and found[-1][
        "left"
    ] == 4 - len(lost)
    assert all(
        event["steps_lost"] <= SYNC_EVERY and event["restored_from"] == "memory" for event in found
    ), found
    assert difference(undisturbed("servers", tmp_path / "one", words), outcome(run)) <= 1e-12


@pytest.mark.ranks4
@pytest.mark.parametrize(
    ("servers", "bound", "words", "plan", "restored"),
    [
        # the others have no ticket any more, and wait at the sync point
        *[(1, None, "", "3 buckets.py:fill 7 1, 2 buckets.py:fill 15 1", ["servers", "servers"])]
        * FULL,
        # they have gradients that may not be applied before the lost one's; then another one is
        # lost that has not copied the sync point
        (
            1,
            2,
            "servers.correct=delay_compensation",
            "3 buckets.py:fill 7 1, 2 loop.py:record 2",
            ["servers", "memory"],
        ),
        *[(2, 1, "servers.correct=scale", "2 worker.py:_finish_fetching 3 1", ["servers"])] * FULL,
        # the servers wait for a gradient of 2 MB to each, of which one may have its part
        (
            2,
            None,
            "model.widths=[2000] comm.bucket_mb=1",
            "3 worker.py:optimizer_step 3",
            ["servers"],
        ),
    ],
)
def test_a_lost_worker_costs_no_update(
    servers: int,
    bound: int | None,
    words: str,
    plan: str,
    restored: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a large message needs its sender to the end, as between hosts
    monkeypatch.setenv("OMPI_MCA_btl_sm_single_copy_mechanism", "none")
    run = tmp_path / "run"
    said = f"servers.count={servers} servers.bound={'none' if bound is None else bound}"
    (result,) = finish(
        "mpi", 4, arguments("servers", run, f"guard.lost=shrink {said} {LOGGED} {words}", plan)
    )
    assert result.returncode == DONE, result
    found = losses_of_ranks(run)
    assert [event["restored_from"] for event in found] == restored and found[-1]["left"] == 4 - len(
        restored
    ), found
    for event in found:
        if event["restored_from"] == "memory":
            continue
        assert event["steps_lost"] == 0
        if "optimizer_step" not in plan:
            (ticket,) = event["given_again"]  # that of the lost worker, and no other
            assert f"ticket {ticket} is given to another worker" in event["lines"][0]
    header, updates = read_updates(run)
    assert header.workers == 4 - servers and sorted(update.ticket for update in updates) == list(
        range(34)
    ), "each step once"
    assert max(update.staleness for update in updates) <= (34 if bound is None else bound)
    replayed = python(["-m", "hvdtrain", "replay", str(run)])
    assert replayed.returncode == DONE and "are the same, bit by bit" in replayed.stdout, (
        replayed.stdout,
        replayed.stderr,
    )


@pytest.mark.parametrize(
    ("servers", "bound", "plan", "why"),
    [
        (1, "none", "0 server.py:reduce 15", "a server is lost"),
        *[(2, "0", "1 server.py:reduce 15", "a server is lost")] * FULL,
        (1, "0", "1 learner.py:step 14, 2 learner.py:step 14", "no worker is left"),
    ],
)
def test_a_server_is_lost(servers: int, bound: str, plan: str, why: str, tmp_path: Path) -> None:
    """The job ends with the newest sync point in a checkpoint, from which the same command goes
    on."""
    run = tmp_path / "run"
    words = (
        f"guard.lost=shrink servers.count={servers} servers.bound={bound} "
        "checkpoint.every_steps=null resume=auto"
    )
    argv = arguments("servers", run, words, plan)
    (result,) = finish("mpi", 3, argv)
    assert result.returncode == LOST and why in result.stdout, result
    assert outcome(run).step == 12 and "lost" in events(run)[-1]["reason"]
    argv[1] = "-"
    (result,) = finish("mpi", 3, argv)
    assert result.returncode == DONE and "resume  from step 12" in result.stdout, result
    if bound == "0":
        assert difference(undisturbed("servers", tmp_path / "one"), outcome(run)) <= 1e-12
