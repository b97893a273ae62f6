"""However a rank fails or is stopped, all ranks end with the right exit code and message, and the
next start resumes the same job."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from faults import (
    ENV,
    Command,
    Row,
    events,
    gone,
    launcher,
    newest,
    next_end,
    outcome,
    reached,
    record,
    straight,
    wait_for,
)
from ranks import ENGINES, FULL, HANG_S, Job, environment, needs_horovod, needs_mpirun
from safetensors.numpy import load_file

from hvdtrain.errors import BUG, DIVERGED, DONE, MEMORY, REQUEUE, STALLED

pytestmark = [pytest.mark.faults, needs_mpirun]
HOST = socket.gethostname()
STALL_S = 3.0
STALL = f"guard.stall_s={STALL_S:g}"


class Link(NamedTuple):
    """One start that ends badly; the rank in trouble is the last one."""

    what: str
    code: int
    words: tuple[str, ...]  # of its output; BAD is the rank in trouble
    fault: str = ""  # of trouble.py
    harm: str = ""  # from outside: "SIGNAL mpirun" or "SIGNAL rank"
    option: str = "guard.stall_s=60"


BEHIND = "behind:\n  BAD, pid"
ENDS = "BAD: the error above ends the job"
LINKS = (
    Link("SIGUSR2 during training", REQUEUE, ("stopped (SIGUSR2) at step",), harm="SIGUSR2 mpirun"),
    Link(
        "SIGUSR2 during an evaluation",
        REQUEUE,
        ("stopped (SIGUSR2) at step",),
        "evaluate",
        "SIGUSR2 mpirun",
    ),
    Link(
        "SIGUSR2 during the start",
        REQUEUE,
        ("SIGUSR2 during the start (",),
        "build",
        "SIGUSR2 mpirun",
    ),
    Link(
        "SIGTERM to one rank",
        REQUEUE,
        ("stopped (a signal on another rank) at step",),
        harm="SIGTERM rank",
    ),
    Link(
        "a rank that sleeps endlessly", STALLED, (BEHIND, "# never returns"), "sleep", option=STALL
    ),
    Link(
        "a stopped rank (SIGSTOP)",
        STALLED,
        ("no answer (", "  BAD\nwaiting: rank"),
        harm="SIGSTOP rank",
        option=STALL,
    ),
    Link("os._exit(0) on one rank", BUG, (), "os_exit"),
    Link(
        "one weight altered on one rank",
        DIVERGED,
        ("ranks differ after step", ": p.layers.1.weight\n", "BAD, against"),
        "alter",
    ),
    Link("a rank in an endless loop", STALLED, (BEHIND, "in do: "), "loop", option=STALL),
    Link("sys.exit(0) on one rank", BUG, ("SystemExit: 0", ENDS), "exit"),
    Link(
        "an infinite loss on one rank",
        DIVERGED,
        ("had a loss or gradient that is not finite", "guard.nonfinite=stop"),
        "infinite",
    ),
    Link("out of memory on one rank", MEMORY, ("out of memory: batch.micro=N", ENDS), "memory"),
)
# in the chain in shards, in test_watchdog.py and test_failures.py
ELSEWHERE = (
    "infinite",
    "sleep",
    "loop",
    "exit",
)
FROM_OUTSIDE = [k for k in LINKS if not k.fault and (FULL or k.code == REQUEUE)]
CHAINS = [
    pytest.param(
        Command("mpi", 2),
        LINKS if FULL else [k for k in LINKS if k.fault not in ("", *ELSEWHERE)],
        id="mpi-2",
    ),
    pytest.param(Command("mpi", 2, ("shard.stage=2",)), [LINKS[0], LINKS[10]], id="mpi-2-sharded"),
    pytest.param(
        Command("horovod", 2),
        LINKS[:8] if FULL else [LINKS[0]],
        id="horovod-2",
        marks=needs_horovod,
    ),
    pytest.param(
        Command("mpi", 4, framework="numpy"), FROM_OUTSIDE, id="mpi-4", marks=pytest.mark.ranks4
    ),
]
if FULL:
    CHAINS += [
        pytest.param(
            Command("horovod", 4),
            [LINKS[7], LINKS[4]],
            id="horovod-4",
            marks=[needs_horovod, pytest.mark.ranks4],
        )
    ]


@pytest.mark.parametrize(("command", "links"), CHAINS)
def test_one_bad_end_after_the_other(tmp_path: Path, command: Command, links: list[Link]) -> None:
    run = tmp_path / "run"
    rows = [end_badly(command, run, link) for link in links]
    last = command.up_to(next_end(run))
    last._replace(words=(*last.words, f"resume={run}")).finish(run)
    equal = outcome(run) == straight(last)
    for row in rows:
        record(row._replace(equal=equal))
    assert equal


@pytest.mark.clock
def test_a_signal_in_training_ends_the_job_within_seconds(tmp_path: Path) -> None:
    """With a checkpoint; 0.9 s where nothing else runs."""
    row = end_badly(Command("mpi", 2), tmp_path / "run", LINKS[0])
    assert row.seconds[0] < 10, row


def end_badly(command: Command, run: Path, link: Link) -> Row:
    """One start, which resumes from the newest checkpoint and ends correctly."""
    before = newest(run)
    begun = len(events(run))
    bad = command.size - 1
    once = run.parent / link.what.replace(" ", "-")
    trouble = (f"model.fault={link.fault}", f"model.rank={bad}", f"model.once={once}") * bool(
        link.fault
    )
    asks = (f"resume={run}",) * bool(before)  # for another fault
    with command._replace(words=(*command.words, link.option, *trouble, *asks)).start(run) as job:
        wait_for(job, once.exists if link.fault else lambda: reached(run, begun) >= before + 20)
        if link.harm:
            once.write_text(f"{time.time()}")
            harm(job, *link.harm.split(), bad)
        result = job.wait()
        gone(job, time.monotonic())
        seconds = time.time() - float(once.read_text())
    output = result.stdout + result.stderr
    assert result.returncode == link.code, (link, result)
    assert [
        words for words in link.words if words.replace("BAD", f"rank {bad} on {HOST}") not in output
    ] == [], (link, output)
    emitted = [(e["kind"], e["step"]) for e in events(run)[begun:]]
    starts, stops = ([step for kind, step in emitted if kind == name] for name in ("start", "stop"))
    trained = link.fault != "build"
    assert (starts, stops) == (
        [before] * trained,
        [newest(run)] * (trained and link.code == REQUEUE),
    ), (link, emitted, newest(run))
    assert ("epoch", newest(run)) not in emitted or link.fault != "evaluate", emitted
    return Row(
        command.engine,
        command.size,
        link.what,
        [seconds],
        max(0, reached(run, begun) - newest(run)),
        None,
        [result.returncode],
    )


def harm(job: Job, name: str, target: str, bad: int) -> None:
    os.kill(launcher(job) if target == "mpirun" else job.pids()[bad], getattr(signal, name))


@pytest.mark.parametrize("engine", ENGINES if FULL else ENGINES[:1])
def test_an_infinite_loss_is_rolled_back_on_all_ranks(tmp_path: Path, engine: str) -> None:
    """Rank 1, step 25: noticed at the sync point of step 30; the checkpoint of 20 is loaded;
    training continues with the data after 30."""
    words = (
        "guard.nonfinite=rollback",
        "model.fault=infinite",
        f"model.once={tmp_path / 'once'}",
        "epochs=2",
    )
    result = Command(engine, 2, words).finish(tmp_path / "run")
    assert (
        result.stdout.count("step 30: a loss or gradient was not finite: rollback, 1 in all") == 1
    ), result.stdout
    emitted = events(tmp_path / "run")
    assert [(e["step"], e["count"]) for e in emitted if e["kind"] == "nonfinite"] == [(30, 1)]
    assert [e["step"] for e in emitted if e["kind"] == "step"] == [
        step for step in range(10, 121, 10) if step != 30
    ]
    arrays = load_file(tmp_path / "run" / "checkpoints" / "step-00000120" / "weights.safetensors")
    assert all(np.isfinite(array).all() for array in arrays.values())
    record(
        Row(
            engine,
            2,
            "an infinite loss on one rank, rolled back",
            [],
            10,
            None,
            [result.returncode],
        )
    )


def test_a_closed_output_ends_no_job(tmp_path: Path) -> None:
    """As by `| head -1`, of both outputs."""
    command = Command("single", 0, ("epochs=2",), framework="numpy")
    run = tmp_path / "run"
    argv = ["timeout", f"{HANG_S}", sys.executable, *command.argv(run)]
    with subprocess.Popen(
        argv, env=environment(ENV), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as job:
        assert job.stdout
        job.stdout.readline()
        job.stdout.close()
        code = job.wait(HANG_S)
    assert code == DONE
    equal = outcome(run) == straight(command)
    record(Row("single", 1, "the output is a closed pipe", [], 0, equal, [code]))
    assert equal
