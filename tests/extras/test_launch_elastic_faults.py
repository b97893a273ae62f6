"""A job under `launch --elastic` on this machine: killed, grown, stopped, and one that fails by its
own error."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from faults import events, reached, same_end, supervisor, told, wait_for
from ranks import FULL, Job, Result, needs_extra, needs_mpirun

from hvdtrain.errors import DIVERGED, DONE, LOST, REQUEUE

pytestmark = [pytest.mark.faults, needs_mpirun]
KILLS = ("rank", "rank0", "host", *["random"] * FULL)
EPOCHS = 1000  # of 60 steps; no job comes that far
WORDS = [
    "data.name=synthetic",
    "data.shape=[16,16,3]",
    "data.samples=960",
    "data.val_samples=64",
    "batch.size=16",
    "batch.evaluate=8",
    f"epochs={EPOCHS}",
    "checkpoint.every_steps=50",
    "model.name=linear",
    "comm.engine=mpi",
    "framework=numpy",
    "speed.precision=fp64",
]


def supervise(hosts: Path, run: Path, *words: str) -> Job:
    options = ["--elastic", "--max", "2", "--every", "1", "--hostfile", str(hosts)]
    return Job(0, ["-m", "hvdtrain", "launch", *options, "--", f"run={run}", *WORDS, *words])


def slots(hosts: Path, count: int) -> None:
    """For a supervisor that reads the file meanwhile."""
    (hosts.parent / "new").write_text(f"localhost slots={count}\n")
    (hosts.parent / "new").rename(hosts)


def kinds(run: Path) -> list[object]:
    return [event["kind"] for event in told(run)]


def ranks_of_starts(run: Path) -> list[int]:
    return [event["ranks"] for event in events(run) if event["kind"] == "start"]


def test_a_job_is_killed_grows_and_shrinks(tmp_path: Path) -> None:
    """On one rank, which is killed; then on two, and on one again: the curve of a job that nobody
    disturbed."""
    run = tmp_path / "run"
    hosts = tmp_path / "hosts"
    slots(hosts, 1)
    with supervise(hosts, run) as job:
        # which the supervisor writes once it has seen a step
        wait_for(job, lambda: reached(run) >= 100 and kinds(run)[-1:] == ["trains"])
        killed_s = time.time()
        before = len(events(run))
        os.kill(job.pids()[0], signal.SIGKILL)
        wait_for(
            job, lambda: kinds(run)[-2:] == ["start", "trains"] and len(ranks_of_starts(run)) == 2
        )
        again = next(
            number
            for number, event in enumerate(events(run))
            if number >= before and event["kind"] == "start"
        )
        step_s = next(event["time"] for event in events(run)[again:] if event["kind"] == "step")
        slots(hosts, 2)
        wait_for(job, lambda: ranks_of_starts(run)[-1] == 2 and kinds(run)[-1] == "trains")
        slots(hosts, 1)
        wait_for(job, lambda: ranks_of_starts(run)[-1] == 1 and kinds(run)[-1] == "trains")
        os.kill(supervisor(job), signal.SIGUSR2)
        result = job.wait()
    print(f"{step_s - killed_s:.1f} s from the kill of a rank to the next sync point")
    assert result.returncode == REQUEUE, result
    assert ranks_of_starts(run) == [1, 1, 2, 1] and events(run)[-1]["kind"] == "stop"
    again = ["start", "trains"]
    assert kinds(run) == [*again, "failed", *again, "change", *again, "change", *again, "end"]
    with Job(
        0, ["-m", "hvdtrain", f"run={tmp_path / 'straight'}", *WORDS, f"stop.steps={reached(run)}"]
    ) as straight:
        assert straight.wait().returncode == DONE
    same_end(run, tmp_path / "straight", reached(run))


def test_ends_that_are_no_new_start(tmp_path: Path) -> None:
    """A signal to the supervisor stops the job, which then goes on; a job that is over; and one
    that fails twice at the same step."""
    run = tmp_path / "run"
    hosts = tmp_path / "hosts"
    slots(hosts, 1)
    with supervise(hosts, run) as job:
        wait_for(job, lambda: reached(run) >= 50)
        os.kill(supervisor(job), signal.SIGTERM)
        result = job.wait()
    assert (result.returncode, events(run)[-1]["kind"], kinds(run)[-1]) == (
        REQUEUE,
        "stop",
        "end",
    ), result
    words = [f"stop.steps={max(100, 100 * (1 + reached(run) // 100))}"]
    first, second = (end_of(hosts, run, *words) for _ in range(2))
    assert (first.returncode, second.returncode) == (DONE, DONE), (first, second)
    assert (
        events(run)[-1]["kind"] == "end"
        and first.stderr.count("start 1") == second.stderr.count("start 1") == 1
    )
    assert "start 2" not in first.stderr + second.stderr

    bad = tmp_path / "bad"
    result = end_of(hosts, bad, "optim.base_lr=1e6", "optim.weight_decay=1")
    assert result.returncode == DIVERGED and kinds(bad).count("start") == 2, result
    assert (
        "not started again, it failed twice at step" in result.stderr
        and "by its own error" in result.stderr
    )


@needs_extra("drill")
def test_a_drill(tmp_path: Path) -> None:
    """Each kind of kill on one job, which ends with 84 (guard.lost=restart) and is started again;
    then a rank is paused."""
    run = tmp_path / "run"
    hosts = tmp_path / "hosts"
    slots(hosts, 2)
    with supervise(hosts, run, "guard.lost=restart") as job:
        wait_for(job, lambda: reached(run) >= 100)
        killed = [drilled(run, "--kill", kind) for kind in KILLS]
        wait_for(job, lambda: kinds(run)[-1] == "trains")
        pids = job.pids()
        paused = drilled(run, "--kill", "rank", "--pause", "2s")
        assert job.pids() == pids
        os.kill(supervisor(job), signal.SIGTERM)
        assert job.wait().returncode == REQUEUE
    assert [harm["ranks"] for harm in killed[:3]] == [[1], [0], [0, 1]]
    codes = [line["code"] for line in told(run) if line["kind"] == "failed"]
    assert len(codes) == len(KILLS) and codes[:2] == [LOST, LOST]
    starts = [number for number, event in enumerate(events(run)) if event["kind"] == "start"]
    for harm, number, failed in zip(
        killed, starts[1:], (line for line in told(run) if line["kind"] == "failed"), strict=True
    ):
        again = events(run)[number]
        last = next(e for e in reversed(events(run)[:number]) if e["kind"] in ("start", "step"))
        seen_s = [
            e["time"]
            for e in events(run)[:number]
            if e["kind"] in ("failed", "lost") and e["time"] >= last["time"]
        ]
        first = next(event for event in events(run)[number:] if event["kind"] == "step")
        assert harm["steps_lost"] == last["step"] - again["step"] >= 0
        assert harm["go_on_s"] - harm["detect_s"] == pytest.approx(
            first["time"] - min([failed["time"], *seen_s]), abs=0.01
        )
        assert 0 < harm["detect_s"] < harm["go_on_s"]
    assert paused["ranks"] == [1] and paused["said"] == "" and paused["go_on_s"] >= 0
    assert paused["window_s"] > max(2, paused["usual_s"]), paused


def drilled(run: Path, *options: str) -> dict[str, Any]:
    """The one harm of a drill."""
    file = run.parent / "drill.json"
    limits = ["--every", "0.5s", "--times", "1", "--wait", "300s", "--json", str(file)]
    with Job(0, ["-m", "hvdtrain", "drill", str(run), *options, *limits]) as drill:
        result = drill.wait()
    print(result.stdout)
    assert result.returncode == DONE, result
    return json.loads(file.read_text())["harms"][0]


def test_a_job_shrinks_in_memory_and_grows_back(tmp_path: Path) -> None:
    """guard.lost=shrink: rank 0 of two is killed; the other goes on in its process, and both are
    started again at the second look after."""
    run = tmp_path / "run"
    hosts = tmp_path / "hosts"
    slots(hosts, 2)
    with supervise(hosts, run, "guard.lost=shrink") as job:
        wait_for(job, lambda: kinds(run) == ["start", "trains"] and reached(run) >= 100)
        pids = job.pids()
        os.kill(pids[0], signal.SIGKILL)
        wait_for(job, lambda: kinds(run)[-1] == "shrunk")
        assert job.pids() == {1: pids[1]}
        wait_for(job, lambda: ranks_of_starts(run) == [2, 2] and kinds(run)[-1] == "trains")
        os.kill(supervisor(job), signal.SIGTERM)
        result = job.wait()
    assert result.returncode == REQUEUE, result
    assert kinds(run) == ["start", "trains", "shrunk", "change", "start", "trains", "end"]
    shrunk, change = told(run)[2:4]
    assert (
        (shrunk["ranks"], shrunk["lost"]) == (1, 1)
        and change["time"] - shrunk["time"] >= 2
        and "1 ranks could be 2" in change["text"]
    )
    with Job(
        0, ["-m", "hvdtrain", f"run={tmp_path / 'straight'}", *WORDS, f"stop.steps={reached(run)}"]
    ) as straight:
        assert straight.wait().returncode == DONE
    same_end(run, tmp_path / "straight", reached(run))


def test_torchrun_starts_all_ranks_again(tmp_path: Path) -> None:
    """After the kill of one; run= goes on from the newest checkpoint."""
    run = tmp_path / "run"
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "2",
        "-m",
        "hvdtrain",
    ]
    words = [word for word in WORDS if not word.startswith("comm.engine")]
    with Job(0, [*torchrun, f"run={run}", *words, "stop.steps=1500"]) as job:
        wait_for(job, lambda: reached(run) >= 100)
        os.kill(job.pids()[1], signal.SIGKILL)
        result = job.wait()
    starts = [event for event in events(run) if event["kind"] == "start"]
    assert result.returncode == DONE and events(run)[-1]["kind"] == "end", result
    assert [event["ranks"] for event in starts] == [2, 2] and starts[1]["step"] >= 100


def end_of(hosts: Path, run: Path, *words: str) -> Result:
    with supervise(hosts, run, *words) as job:
        return job.wait()
