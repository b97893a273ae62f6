"""Jobs that lose ranks, on both engines, and what they must have in common with one process that
nothing happens to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from faults import events, newest
from ports import free_port
from ranks import ROOT, Job, Result, python
from safetensors.numpy import load_file

SYNC_EVERY = 3  # steps
KILLED_RANKS = str(ROOT / "tests" / "support" / "killed_ranks.py")
DATA = (
    "data.name=synthetic data.shape=[8,8,3] data.samples=200 data.val_samples=40 batch.size=24 "
    "batch.evaluate=5 epochs=4"
)
RULE = (
    "speed.precision=fp64 optim.name=sgd optim.base_lr=0.05 guard.equal_steps=6 guard.stall_s=300"
)
WHEN = f"log.every_steps={SYNC_EVERY} log.every_s=0 checkpoint.every_steps=6"
MODELS = {
    "torch": "model.name=convnet model.widths=[3,4] model.dense=[7] norm.kind=sync "
    "comm.bucket_mb=0.001",
    "servers": "model.name=mlp model.widths=[9] comm.bucket_mb=0.001 optim.momentum=0.9",
    "numpy": "framework=numpy model.name=linear batch.micro=5",
}
ENV = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])}


def arguments(framework: str, run: Path, words: str = "", plan: str = "-") -> list[str]:
    """Returns the arguments of a job whose model has every kind of state. It makes 34 steps; steps
    9, 17, 25 and 34 end an epoch."""
    return [
        KILLED_RANKS,
        plan,
        *DATA.split(),
        *RULE.split(),
        *WHEN.split(),
        *MODELS[framework].split(),
        *words.split(),
        f"run={run}",
    ]


def start(
    engine: str, size: int, argv: Sequence[str], stack: contextlib.ExitStack, *, ulfm: bool = True
) -> list[Job]:
    """mpi: one mpirun; torchdist: a process for each rank, which nothing ends when another one
    does."""
    if engine == "mpi":
        options = ["--with-ft", "ulfm"] if ulfm else []
        return [
            stack.enter_context(
                Job(size, [*argv, "comm.engine=mpi"], env=ENV, options=options, is_warm=True)
            )
        ]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "HVDTRAIN_SECRET": "of the test",
        **ENV,
    }
    shared |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    each = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return [
        stack.enter_context(Job(0, [*argv, "comm.engine=torchdist"], env=env, is_warm=True))
        for env in each
    ]


def finish(engine: str, size: int, argv: Sequence[str], *, ulfm: bool = True) -> list[Result]:
    """Returns the outcome of mpirun, or of each rank."""
    with contextlib.ExitStack() as stack:
        return [job.wait() for job in start(engine, size, argv, stack, ulfm=ulfm)]


class Outcome(NamedTuple):
    step: int  # of the last checkpoint
    arrays: dict[str, np.ndarray]


def outcome(run: Path) -> Outcome:
    folder = run / "checkpoints" / f"step-{newest(run):08d}"
    arrays = {
        name: array
        for file in sorted(folder.glob("*.safetensors"))
        for name, array in load_file(file).items()
    }
    return Outcome(newest(run), arrays)


def undisturbed(framework: str, run: Path, words: str = "") -> Outcome:
    """Returns the outcome of one process."""
    result = python(arguments(framework, run, words), env=ENV)
    assert result.returncode == 0, result.stderr
    return outcome(run)


def difference(one: Outcome, other: Outcome) -> float:
    """Returns the largest difference of any number; infinite if arrays or steps differ."""
    if one.step != other.step or one.arrays.keys() != other.arrays.keys():
        return np.inf
    return max(
        float(np.abs(a.astype(float) - other.arrays[name].astype(float)).max())
        for name, a in one.arrays.items()
    )


def losses_of_ranks(run: Path) -> list[dict[str, Any]]:
    """The events "lost"."""
    return [event for event in events(run) if event["kind"] == "lost"]
