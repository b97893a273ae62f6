"""guard.lost=shrink with parameter servers: the others go on without a worker; without a server the job ends, and can be started again."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import events
from lost_ranks import SYNC_EVERY, arguments, difference, finish, losses_of_ranks, outcome, undisturbed
from ranks import needs_mpirun, python

from hvdtrain.errors import DONE, LOST
from hvdtrain.training.telemetry.update_log import read_updates

pytestmark = [pytest.mark.faults, needs_mpirun]
LOGGED = "servers.log=true optim.name=lamb model.dropout=0.2"


@pytest.mark.ranks4
@pytest.mark.parametrize(
    ("servers", "words", "plan", "lost"),
    [
        (2, "servers.bound=0 optim.name=lamb", "3 learner.py:step 8", {3}),
        (1, "servers.bound=0", "2 loop.py:evaluate 2, 1 memory_copy.py:restore 1", {1, 2}),
        (2, f"servers.bound=4 {LOGGED} servers.correct=scale", "3 worker.py:_fetch 4", {3}),
        (1, f"servers.bound=none {LOGGED}", "2 worker.py:start 5, 1 learner.py:step 9", {1, 2}),
    ],
)
def test_a_worker_is_lost(servers: int, words: str, plan: str, lost: set[int], tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = arguments("servers", run, f"guard.lost=shrink servers.count={servers} {words}", plan)
    (result,) = finish("mpi", 4, argv)
    assert result.returncode == DONE, result
    found = losses_of_ranks(run)
    assert {rank for event in found for rank in event["ranks"]} == lost and found[-1]["left"] == 4 - len(lost)
    assert all(event["steps_lost"] <= SYNC_EVERY and event["restored_from"] == "memory" for event in found), found
    if "bound=0" in words:
        rule = next((word for word in words.split() if word.startswith("optim")), "")
        assert difference(undisturbed("servers", tmp_path / "one", rule), outcome(run)) <= 1e-12
        return
    header, updates = read_updates(run)
    assert header.workers == 4 - servers and sorted(update.ticket for update in updates) == list(range(34)), "each step once"
    oldest = max(update.staleness for update in updates)
    assert oldest <= (4 if "bound=4" in words else 34)
    replayed = python(["-m", "hvdtrain", "replay", str(run)])
    assert replayed.returncode == DONE and "are the same, bit by bit" in replayed.stdout, (replayed.stdout, replayed.stderr)


@pytest.mark.parametrize(
    ("servers", "bound", "plan", "why"),
    [
        (1, "none", "0 server.py:reduce 15", "a server is lost"),
        (2, "0", "1 server.py:reduce 15", "a server is lost"),
        (1, "0", "1 learner.py:step 14, 2 learner.py:step 14", "no worker is left"),
    ],
)
def test_a_server_is_lost(servers: int, bound: str, plan: str, why: str, tmp_path: Path) -> None:
    """The job ends with the newest sync point in a checkpoint, from which the same command goes on."""
    run = tmp_path / "run"
    words = f"guard.lost=shrink servers.count={servers} servers.bound={bound} checkpoint.every_steps=null resume=auto"
    argv = arguments("servers", run, words, plan)
    (result,) = finish("mpi", 3, argv)
    assert result.returncode == LOST and why in result.stdout, result
    assert outcome(run).step == 12 and "lost" in events(run)[-1]["reason"]
    argv[1] = "-"
    (result,) = finish("mpi", 3, argv)
    assert result.returncode == DONE and "resume  from step 12" in result.stdout, result
    if bound == "0":
        assert difference(undisturbed("servers", tmp_path / "one"), outcome(run)) <= 1e-12
