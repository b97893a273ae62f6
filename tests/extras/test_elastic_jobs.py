"""guard.lost: the surviving ranks continue without the killed ones, and the result equals that of
one process that nothing happened to."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import tempfile
from pathlib import Path

import pytest
from faults import events, wait_for
from lost_ranks import (
    SYNC_EVERY,
    Outcome,
    arguments,
    difference,
    finish,
    losses_of_ranks,
    outcome,
    start,
    undisturbed,
)
from ranks import FULL, Result, needs_mpirun

from hvdtrain.errors import DONE, LOST, MEMORY, REQUEUE, STALLED, USER
from hvdtrain.records.run import read_run

pytestmark = pytest.mark.faults

# rank, call of a function of its process: killed_ranks.py
IN_STEP_IN_EVALUATION_AND_AGAIN = "2 step 7, 0 loop.py:evaluate 2, 1 step 25"
TWO_AT_ONCE_AND_RANK_0_IN_THE_REFORM = "1 step 5, 3 step 5, 0 shrink 1"
IN_A_CHECKPOINT_AND_WHILE_STATE_IS_GIVEN_BACK = (
    "0 saver.py:_write 2, 3 step 20, 1 memory_copy.py:restore 2"
)
KILLS = [
    ("numpy", 4, IN_STEP_IN_EVALUATION_AND_AGAIN, {0, 1, 2}),
    ("numpy", 4, TWO_AT_ONCE_AND_RANK_0_IN_THE_REFORM, {0, 1, 3}),
    ("torch", 3, IN_STEP_IN_EVALUATION_AND_AGAIN.rpartition(",")[0], {0, 2}),
    ("numpy", 4, IN_A_CHECKPOINT_AND_WHILE_STATE_IS_GIVEN_BACK, {0, 1, 3}),
    ("numpy", 2, "0 train_job.py:finish 1", {0}),
]
CASES = [("mpi", *KILLS[number]) for number in (0, 3)] + [
    ("torchdist", *KILLS[number]) for number in (1, 4)
]
if FULL:
    CASES = [(engine, *kills) for engine in ("mpi", "torchdist") for kills in KILLS]


IN_AN_EXCHANGE_IN_A_CHECKPOINT_AND_AGAIN = (
    "2 memory_copy.py:exchange 3, 0 saver.py:_write 3, 1 memory_copy.py:restore 2"
)
IN_STEP_WHILE_PARTS_COME_AND_IN_EVALUATION = (
    "1 learner.py:step 8, 3 memory_copy.py:wholes 1, 0 loop.py:evaluate 3"
)
A_RANK_ITS_NEIGHBOUR_AND_RANK_0 = (
    "1 learner.py:step 15, 2 memory_copy.py:restore 1, 0 learner.py:step 30"
)
MUON = "optim.name=muon optim.rest_rate=1 optim.ema=0.8"
SHARDED = [  # from_checkpoint: the ranks with which all copies of some parts are lost
    (
        "mpi",
        "shard.stage=2 optim.name=lamb",
        IN_AN_EXCHANGE_IN_A_CHECKPOINT_AND_AGAIN,
        {0, 1, 2},
        [0, 1],
    ),
    (
        "torchdist",
        f"shard.stage=1 {MUON}",
        IN_STEP_WHILE_PARTS_COME_AND_IN_EVALUATION,
        {0, 1, 3},
        [],
    ),
    *[
        (
            "torchdist",
            "shard.stage=1 optim.name=adam",
            IN_STEP_WHILE_PARTS_COME_AND_IN_EVALUATION,
            {0, 1, 3},
            list[int](),
        )
    ]
    * FULL,
    *[
        (
            "mpi",
            f"shard.stage=2 {MUON}",
            IN_STEP_WHILE_PARTS_COME_AND_IN_EVALUATION,
            {0, 1, 3},
            list[int](),
        )
    ]
    * FULL,
    *[("mpi", "shard.stage=1", IN_STEP_WHILE_PARTS_COME_AND_IN_EVALUATION, {0, 1, 3}, list[int]())]
    * FULL,
    ("torchdist", "shard.stage=2", A_RANK_ITS_NEIGHBOUR_AND_RANK_0, {0, 1, 2}, [1, 2]),
]


@functools.cache
def straight(framework: str, words: str = "") -> tuple[Outcome, list[float]]:
    """Of one process: its last checkpoint, and the loss of each evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        return undisturbed(framework, run, words), [
            event["val_loss"] for event in events(run) if event["kind"] == "epoch"
        ]


@needs_mpirun
@pytest.mark.ranks4
@pytest.mark.parametrize(("engine", "framework", "size", "plan", "lost"), CASES)
def test_the_end_is_that_of_one_process(
    engine: str, framework: str, size: int, plan: str, lost: set[int], tmp_path: Path
) -> None:
    results = finish(
        engine, size, arguments(framework, tmp_path / "run", "guard.lost=shrink", plan)
    )
    check_end(tmp_path / "run", engine, size, lost, results, straight(framework))
    assert all(event["restored_from"] == "memory" for event in losses_of_ranks(tmp_path / "run"))


@needs_mpirun
@pytest.mark.ranks4
@pytest.mark.parametrize(("engine", "words", "plan", "lost", "from_checkpoint"), SHARDED)
def test_what_a_lost_rank_had_alone_comes_from_its_neighbour_or_the_newest_checkpoint(
    engine: str, words: str, plan: str, lost: set[int], from_checkpoint: list[int], tmp_path: Path
) -> None:
    """The optimizer's state is sharded; the surviving ranks shard it again."""
    results = finish(
        engine, 4, arguments("torch", tmp_path / "run", f"guard.lost=shrink {words}", plan)
    )
    rule = " ".join(word for word in words.split() if word.startswith("optim"))
    check_end(tmp_path / "run", engine, 4, lost, results, straight("torch", rule))
    found = [
        event
        for event in losses_of_ranks(tmp_path / "run")
        if event["restored_from"] == "checkpoint"
    ]
    assert [rank for event in found for rank in sorted(event["ranks"])] == from_checkpoint, found


@needs_mpirun
@pytest.mark.ranks4
def test_ranks_that_are_lost_while_the_others_form_their_group(tmp_path: Path) -> None:
    """torchdist: one when its loss keeps the group from being there, then one when it is there and
    nobody has used it."""
    plan = "1 step 7, 2 _start_process_group 2, 0 split_groups 1"
    run = tmp_path / "run"
    results = finish("torchdist", 4, arguments("numpy", run, "guard.lost=shrink", plan))
    check_end(run, "torchdist", 4, {0, 1, 2}, results, straight("numpy"))
    (loss,) = losses_of_ranks(run)
    assert sorted(loss["ranks"]) == [0, 1, 2], loss


@needs_mpirun
def test_without_a_copy_and_a_checkpoint_the_job_ends(tmp_path: Path) -> None:
    argv = arguments(
        "torch",
        tmp_path / "run",
        "guard.lost=shrink shard.stage=1",
        "1 learner.py:step 5, 2 memory_copy.py:restore 1",
    )
    (result,) = finish("mpi", 3, argv)
    assert result.returncode == LOST, result
    assert (
        "ranks are lost, and with them all copies of some parts of the training state; no "
        "checkpoint in" in result.stderr
    )


def check_end(
    run: Path,
    engine: str,
    size: int,
    lost: set[int],
    results: list[Result],
    one: tuple[Outcome, list[float]],
) -> None:
    """Of a job that has lost these ranks; `one`: of one process."""
    codes = [result.returncode for result in results]
    assert codes == (
        [DONE] if engine == "mpi" else [-9 if rank in lost else DONE for rank in range(size)]
    ), results
    last, val_losses = one
    assert difference(last, outcome(run)) <= 1e-12
    found = losses_of_ranks(run)
    assert {rank for event in found for rank in event["ranks"]} == lost
    assert found[-1]["left"] == size - len(lost)
    assert all(
        event["steps_lost"] <= SYNC_EVERY or event["restored_from"] == "checkpoint"
        for event in found
    ), found
    record = read_run(run)
    assert [event["step"] for event in record.epoch_events()] == [9, 17, 25, 34]
    assert [event["val_loss"] for event in record.epoch_events()] == pytest.approx(
        val_losses, rel=1e-12
    )
    assert [event["step"] for event in record.step_events()] == sorted(
        {*range(3, 34, 3), 17, 25, 34}
    )
    assert not list(run.glob("*lock*"))


@needs_mpirun
def test_restart_writes_the_last_sync_point_and_ends(tmp_path: Path) -> None:
    """The same command, started again, resumes from there."""
    argv = arguments(
        "numpy", tmp_path, "guard.lost=restart checkpoint.every_steps=null resume=auto", "0 step 15"
    )
    (result,) = finish("mpi", 3, argv)
    assert result.returncode == LOST, result
    assert outcome(tmp_path).step == 12 and "rank 0 on" in events(tmp_path)[-1]["reason"]
    argv[1] = "-"
    (result,) = finish("mpi", 2, argv)
    assert result.returncode == DONE, result
    assert difference(straight("numpy")[0], outcome(tmp_path)) <= 1e-12


LONG = "guard.lost=shrink epochs=40 resume=auto checkpoint.every_steps=null"


@needs_mpirun
@pytest.mark.parametrize(
    ("engine", "by", "rank"),
    [("mpi", signal.SIGTERM, 1), *[("torchdist", signal.SIGUSR2, 2)] * FULL],
)
def test_a_signal_after_a_loss_stops_at_a_sync_point(
    engine: str, by: signal.Signals, rank: int, tmp_path: Path
) -> None:
    """Rank 0 is lost; the signal is for the one that took its place, or for another one."""
    argv = arguments("numpy", tmp_path, LONG, "0 step 7")
    with contextlib.ExitStack() as stack:
        jobs = start(engine, 3, argv, stack)
        wait_for(
            jobs[-1], lambda: losses_of_ranks(tmp_path) and events(tmp_path)[-1]["kind"] == "step"
        )
        os.kill(jobs[rank if len(jobs) > 1 else 0].pids()[rank], by)
        results = [job.wait() for job in jobs]
    assert [result.returncode for result in results] == (
        [REQUEUE] if engine == "mpi" else [-9, REQUEUE, REQUEUE]
    ), results
    stopped = outcome(tmp_path).step
    assert SYNC_EVERY < stopped < 340 and events(tmp_path)[-1]["kind"] == "stop"
    argv[1] = "-"
    (result,) = finish("mpi", 2, argv)
    assert result.returncode == DONE and f"step {stopped}" in result.stdout, result
    assert difference(straight("numpy", "epochs=40")[0], outcome(tmp_path)) <= 1e-12


@needs_mpirun
def test_a_rank_that_hangs_after_a_loss_is_named_by_its_new_number(tmp_path: Path) -> None:
    """Rank 0 is lost; the last of the other two hangs, and the same command resumes from the
    checkpoint before."""
    trouble = (
        "model.name=trouble:Trouble model.fault=sleep model.rank=2 model.at=20 "
        f"model.once={tmp_path / 'once'}"
    )
    words = (
        f"{trouble} guard.lost=shrink guard.stall_s=5 guard.start_s=600 resume=auto "
        f"run={tmp_path / 'run'}"
    )
    argv = [
        word
        for word in arguments("torch", tmp_path / "run", "", "0 learner.py:step 7")
        if not word.startswith(("model.", "guard."))
    ]
    (result,) = finish("mpi", 3, [*argv, *words.split()])
    assert result.returncode == STALLED, result
    assert (
        "behind:\n  rank 1 on" in result.stderr
        and "time.sleep(1000)  # never returns" in result.stderr
    ), result.stderr
    assert [event["ranks"] for event in losses_of_ranks(tmp_path / "run")] == [[0]]
    argv[1] = "-"
    (result,) = finish("mpi", 2, [*argv, *words.split()])
    assert result.returncode == DONE and "step 18" in result.stdout, result
    assert outcome(tmp_path / "run").step == 34


@needs_mpirun
def test_an_error_of_a_rank_itself_ends_all_ranks(tmp_path: Path) -> None:
    words = (
        "guard.lost=shrink model.name=trouble:Trouble model.fault=memory model.rank=1 model.at=9"
    )
    (result,) = finish(
        "mpi",
        3,
        [
            word
            for word in arguments("torch", tmp_path, words)
            if not word.startswith(("model.w", "model.d"))
        ],
    )
    assert result.returncode == MEMORY and "rank 1 on" in result.stderr, result
    assert not losses_of_ranks(tmp_path)


@needs_mpirun
def test_without_ulfm_the_job_does_not_start(tmp_path: Path) -> None:
    (result,) = finish(
        "mpi", 2, arguments("numpy", tmp_path / "run", "guard.lost=shrink"), ulfm=False
    )
    assert result.returncode == USER, result
    assert "mpirun --with-ft ulfm" in result.stderr and "started without ULFM" in result.stderr
    assert not (tmp_path / "run").exists()


@needs_mpirun
def test_without_ulfm_restart_says_what_it_does_not_do(tmp_path: Path) -> None:
    (result,) = finish(
        "mpi", 2, arguments("numpy", tmp_path / "run", "guard.lost=restart epochs=1"), ulfm=False
    )
    assert result.returncode == DONE, result
    said = (
        "guard.lost=restart writes no last checkpoint when a rank is lost: MPI ends the job when "
        "the first rank dies: it was started "
    )
    assert result.stderr.count(f"{said}without ULFM (mpirun --with-ft ulfm") == 1, result.stderr
