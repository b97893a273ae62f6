"""The loss curves of jobs with parallel.dense, and the files of a checkpoint, on the ranks.

few: each job with one scheme, and one with several updates of the dense part. The job "faulty"
leaves out a sum over ranks, which the test must notice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dense_on_ranks
import invariance
import numpy as np
import shards_on_ranks

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper
from hvdtrain.data.sampler import share_bounds
from hvdtrain.tasks.classification import without_statistics
from hvdtrain.training.build import build_learner

SCHEMES = ("a", "b", "c")
STEPS = "batch.size=11 optim.base_batch=11 recipe.warmup=0"
CONVNET = (
    f"model.name=convnet model.widths=[3,4] model.dense=[7,5] model.norm=false max_steps=5 {STEPS}"
)
ALEXNET = (
    "model.name=alexnet model.widths=[3,4,3,2,5] model.dense=[7,5] model.dropout=0 max_steps=3 "
    f"{STEPS}"
)
IN_PART = "optim.exclude=none optim.clip_norm=0.5 optim.clip_value=0.1"
CLIPPED = f"{IN_PART} batch.micro=3"
SGD = "optim.name=sgd optim.base_lr=1"
NOISE = "recipe.gradient_noise=0.01"
JOBS = {  # by name, with the scheme that has it among few; "": none
    "sgd, micro-batches": (
        "c",
        f"{CONVNET} {SGD} batch.micro=3 evaluate.samples=15 batch.evaluate=7",
    ),
    "stage 2, noise": (
        "b",
        f"{CONVNET} {SGD} {NOISE} data.sampling=partition batch.micro=2 shard.stage=2 "
        "comm.bucket_mb=0.001",
    ),
    "lamb": ("b", f"{CONVNET} optim.name=lamb optim.base_lr=0.02 {CLIPPED}"),
    "lars": ("", f"{CONVNET} optim.name=lars optim.base_lr=0.02 {CLIPPED}"),
    "adam": ("c", f"{CONVNET} optim.name=adam optim.base_lr=0.02 {CLIPPED}"),
    "alexnet": ("a", f"{ALEXNET} {SGD} optim.clip_norm=0.5"),
    "one layer": ("b", f"{CONVNET} model.dense=[] {SGD}"),
}
UPDATES = {  # updates with the variable batch; a single process makes these with parallel.dense too
    "sgd, c, 3 updates": f"{CONVNET} {SGD} parallel.dense=c parallel.dense_updates=3 "
    "recipe.sample_noise=0.5 shard.stage=2",
    "adam, c, 2 updates": f"{CONVNET} optim.name=adam optim.base_lr=0.02 {IN_PART} "
    "parallel.dense=c parallel.dense_updates=2",
    "lars, b, 11 updates": f"{ALEXNET} optim.name=lars optim.base_lr=0.2 {IN_PART} "
    "parallel.dense=b parallel.dense_updates=11",
}
FILES = f"{CONVNET} optim.name=novograd"


def jobs_of(how: str) -> dict[str, str]:
    """Name -> words."""
    return {
        f"{job} {scheme}": f"{words} parallel.dense={scheme}"
        for job, (first, words) in JOBS.items()
        for scheme in SCHEMES
        if how != "few" or scheme == first
    } | {job: words for job, words in UPDATES.items() if how != "few" or job == next(iter(UPDATES))}


def left_out(communicator: Communicator, precision: str) -> dict[str, Any]:
    """A step of 12 samples whose second of three turns has a loss that is not finite: what it
    reports, and the parts that it changed."""
    words = (
        f"{CONVNET} {SGD} parallel.dense=c parallel.dense_updates=3 guard.nonfinite=skip "
        f"batch.size=12 speed.precision={precision}"
    )
    config = configure(None, words.split())
    learner = build_learner(config, without_statistics((8, 8, 1), 10), communicator)
    rng, own = (
        np.random.default_rng(1),
        slice(*share_bounds(12, communicator.rank, communicator.size)),
    )
    batch = {
        "x": rng.integers(0, 256, (12, 8, 8, 1), dtype=np.uint8),
        "y": rng.integers(0, 10, 12),
        "w": np.ones(12),
    }
    batch["w"][7] = np.inf
    before = learner.state()
    sums = learner.step(
        [learner.to_device({name: array[own] for name, array in batch.items()})],
        Hyper(0.1, 0.9, 0.0, batch=12),
        0,
    )
    after = learner.state()
    changed = {
        name: float(np.abs(after[name] - before[name]).sum())
        for name in after
        if name.startswith("p.")
    }
    nonfinite = communicator.allreduce(sums["nonfinite"].reshape(1).double(), "nonfinite")
    return {
        "nonfinite": float(nonfinite),
        "changed": {name: change for name, change in changed.items() if change},
    }


def curves(communicator: Communicator, folder: str, how: str = "") -> dict[str, Any]:
    """By job; folder: of the checkpoint."""
    alone = communicator.size == 1
    jobs = jobs_of(how)
    if alone:
        first = next(iter(JOBS))
        jobs = (
            {job: words for job, (_, words) in JOBS.items()}
            | {f"{first} a": f"{JOBS[first][1]} parallel.dense=a"}
            | UPDATES
        )
    results: dict[str, Any] = {
        job: invariance.losses(words, communicator) for job, words in jobs.items()
    }
    results["files"] = shards_on_ranks.checkpoint(
        Path(folder), FILES + " parallel.dense=a" * (not alone), communicator
    )
    results["left out"] = {
        precision: left_out(communicator, precision) for precision in ("fp64", "fp16")
    }
    if not alone:
        faulty: Any = dense_on_ranks.NotSummed(communicator)
        words = f"{JOBS['one layer'][1]} parallel.dense=a"
        results["faulty"] = invariance.losses(words, faulty)
    return results
