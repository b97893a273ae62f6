"""SIGKILL of a rank or of mpirun at any moment costs no more than the last interval, and does not
change the result."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from faults import (
    CHECKPOINT_EVERY,
    SYNC_EVERY,
    Command,
    Kill,
    Row,
    Trial,
    ends_as_straight,
    kill,
    kills,
    record,
)
from ranks import FULL, needs_horovod, needs_mpirun

pytestmark = [pytest.mark.faults, needs_mpirun]
SEED = int(os.environ.get("HVDTRAIN_FAULTS_SEED", "4"))

CHAINS = [
    pytest.param(Command("mpi", 2, framework="numpy"), 12 if FULL else 4, 0, id="mpi-2"),
    pytest.param(
        Command("mpi", 4, framework="numpy"),
        10 if FULL else 2,
        2,
        id="mpi-4",
        marks=pytest.mark.ranks4,
    ),
    pytest.param(
        Command("horovod", 2, ("shard.stage=2",)),
        6 if FULL else 1,
        5,
        id="horovod-2-sharded",
        marks=needs_horovod,
    ),
]
if FULL:
    CHAINS += [
        pytest.param(Command("mpi", 2, framework="numpy"), 12, 1, id="mpi-2-again"),
        pytest.param(Command("horovod", 2), 10, 3, id="horovod-2", marks=needs_horovod),
        pytest.param(
            Command("horovod", 4), 6, 4, id="horovod-4", marks=[needs_horovod, pytest.mark.ranks4]
        ),
    ]


@pytest.mark.every_day
@pytest.mark.parametrize(("command", "count", "more"), CHAINS)
def test_sigkill_at_any_moment(tmp_path: Path, command: Command, count: int, more: int) -> None:
    """Kill after kill, the same command each time."""
    run = tmp_path / "run"
    trials = [kill(command, run, what) for what in kills(10 * SEED + more, command.size, count)]
    equal = ends_as_straight(command, run)
    for (who, when), mine in sorted(sort(trials).items()):
        lost = max(t.lost for t in mine)
        codes = sorted({t.code for t in mine})
        record(
            Row(
                command.engine,
                command.size,
                f"SIGKILL of {who} during {when}",
                [t.seconds for t in mine],
                lost,
                equal,
                codes,
            )
        )
        assert lost <= CHECKPOINT_EVERY + SYNC_EVERY
        assert codes == ([-9] if who == "mpirun" else [137])  # 137: mpirun's word for it
    assert equal


@pytest.mark.clock
def test_without_mpirun_the_ranks_end_within_seconds(tmp_path: Path) -> None:
    """In training; in a second where nothing else runs. What a killed rank takes:
    test_all_ranks_end_within_seconds."""
    trial = kill(
        Command("mpi", 2, framework="numpy"), tmp_path / "run", Kill(rank=-1, steps=20, pause_s=0.0)
    )
    assert trial.seconds < 15, trial


def sort(trials: list[Trial]) -> dict[tuple[str, str], list[Trial]]:
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        who = (
            "mpirun"
            if trial.what.rank < 0
            else "rank 0"
            if trial.what.rank == 0
            else "another rank"
        )
        groups.setdefault((who, "training" if trial.what.steps else "the start"), []).append(trial)
    return groups
