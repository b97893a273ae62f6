"""The loss curves of jobs with every shard.stage on one engine, on the ranks."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import invariance
import numpy as np
import torch
import torch.distributed as dist
from ranks import implemented, of_this_copy

from hvdtrain.comm.communicator import Buffer, Communicator, CompletedHandle, Handle
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Arrays
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import Diverged
from hvdtrain.tasks.classification import without_statistics
from hvdtrain.training.build import build_learner
from hvdtrain.training.checkpoint import files
from hvdtrain.training.checkpoint.shards import CheckpointShard, WrittenByAll, write_parts
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.failure import RankFailed
from hvdtrain.training.progress.train_state import Progress, TrainState
from hvdtrain.training.replicas.compare import check_equal
from hvdtrain.training.run_rank import ConnectedRank, on_connected_ranks

CLIPPED = "optim.base_lr=0.02 optim.clip_norm=0.5 optim.clip_value=0.1 batch.micro=5"
# with options; in these few steps larc's own mode would clip every ratio to 1, so that no norm
# counted
RULES = {
    f"mlp, {rule}": f"optim.name={rule}{' optim.mode=scale' * (rule == 'larc')} {CLIPPED}"
    for rule in ("sgd", "lars", "larc", "lamb", "novograd", "adam", "adamw")
}
MLP = "model.name=mlp model.widths=[24,7] max_steps=6 comm.bucket_mb=0.004"
GPT = (
    "task.name=language data.name=digit_tokens:windows model.name=gpt model.layers=2 "
    "model.heads=2 model.width=24 model.tied=true "
    "model.recompute=all optim.name=sgd optim.base_lr=0.05 max_steps=4 batch.micro=4"
)
# on 2 ranks every seventh step straddles epochs so that rank 1 has no sample, and rank 0 none in
# the last batch of an evaluation
EMPTY_SHARES = implemented(
    "data.name=synthetic data.samples=7 data.val_samples=5 data.shape=[4,4,1] "
    "data.sampling=partition batch.size=2 batch.evaluate=1 "
    "model.name=mlp model.widths=[9,7] optim.name=sgd optim.base_lr=0.1 epochs=9 max_steps=12 "
    "evaluate.views=2"
)
JOBS = {
    # without clipping: that hides a gradient of another scale, and Adam does too
    "mlp, sgd, micro-batches": f"{MLP} optim.name=sgd optim.base_lr=0.2 batch.micro=2 "
    "model.label_smoothing=0.1",
    "everything": f"{invariance.GROWN} max_steps=12",
    "gpt": GPT,
    "empty shares": EMPTY_SHARES,
    "own weights": "model.name=shards_on_ranks:OwnWeights optim.base_lr=0.05 max_steps=4",
    **{name: f"{MLP} {words}" for name, words in RULES.items()},
    "mlp, muon": f"{MLP} optim.name=muon optim.rest=[] optim.rest_rate=0.1 optim.unit_rows=true "
    f"{CLIPPED}"
    ' optim.groups=[{"names":"fc1.*","rate":0.5}]',
    "convnet, muon": "model.name=convnet model.widths=[4,6] model.norm=false optim.name=muon "
    f"{CLIPPED} max_steps=6",
    "resnet": "model.widths=[2,2,2,2] optim.base_lr=0.02 max_steps=4",
    "unused layer": "model.name=faulty:Faulty optim.base_lr=0.05 max_steps=6",
    "RMSprop, noise": f"{MLP} optim.name=torch.optim.RMSprop optim.base_lr=0.001 "
    "recipe.gradient_noise=0.01",
}
JAX_MLP = f"framework=jax {MLP}"  # without buckets
JAX_JOBS = {
    "mlp, sgd, micro-batches": f"{JAX_MLP} optim.name=sgd optim.base_lr=0.2 batch.micro=2 "
    "model.label_smoothing=0.1",
    "everything": f"framework=jax {invariance.GROWN} max_steps=12",
    "gpt": f"framework=jax {GPT}",
    "empty shares": f"framework=jax {EMPTY_SHARES}",
    **{name: f"{JAX_MLP} {words}" for name, words in RULES.items()},
    "convnet, noise, all decay": "framework=jax model.name=convnet model.widths=[4,6] "
    "model.norm=false optim.name=sgd "
    "optim.base_lr=0.1 max_steps=6 "
    "optim.exclude=none recipe.gradient_noise=0.01 guard.nonfinite=skip",
}
NOISE_SCALE = f"{JAX_MLP} optim.name=sgd optim.base_lr=0.05 log.noise_scale=true"
FEW = ("mlp, sgd, micro-batches", "everything", "gpt", "empty shares", "own weights")


class OwnWeights(torch.nn.Module):
    """A model whose initial weights ignore the seed and differ between ranks: all ranks train with
    rank 0's."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
        self.hidden = torch.nn.Linear(math.prod(shape), 70)
        self.last = torch.nn.Linear(70, classes)
        with torch.no_grad():
            self.hidden.weight.copy_(
                torch.randn(70, math.prod(shape), generator=torch.Generator().manual_seed(rank)) / 8
            )
        self.register_buffer("shift", torch.full((70,), rank + 1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.hidden(x.flatten(1)) + self.shift))


class Averaged:
    """A communicator whose reductions to the owners of parts give the mean; all else is the real
    communicator's."""

    def __init__(self, communicator: object) -> None:
        self._communicator = communicator

    def __getattr__(self, name: str) -> object:
        return getattr(self._communicator, name)

    def start_reduce_scatter(self, x: Buffer, name: str) -> Handle:
        return CompletedHandle(
            self._communicator.start_reduce_scatter(x, name).wait() / self._communicator.size
        )


def jobs_of(*how: str) -> dict[str, str]:
    """Returns name -> words, without the stage, for the jobs that `how` names, or for all jobs."""
    jobs = JAX_JOBS if "jax" in how else JOBS
    named = {
        name: words for name, words in jobs.items() if name.endswith("muon") or "muon" not in how
    }
    few = (*FEW, "mlp, lamb") if "jax" in how else FEW  # a rule that needs norms over ranks
    chosen = few if "few" in how else named.keys() & set(how) or named.keys()
    return {name: words for name, words in named.items() if name in chosen}


def checkpoint(run: Path, words: str, communicator: Communicator) -> dict[str, str]:
    """The SHA-256 of each file of a checkpoint of numbers that are the same for any stage and
    number of ranks."""
    config = configure(None, f"{invariance.COMMON} {words}".split())
    learner = build_learner(config, open_datasets(config, communicator).task, communicator)
    learner.load(
        {
            piece.name: np.cos(np.arange(math.prod(piece.shape)) + i).reshape(piece.shape)
            for i, piece in enumerate(learner.pieces())
        }
    )
    now = TrainState(Progress(10, 100, 3, 24))
    hosts = [""] * communicator.size
    name = files.unfinished_name(3, "0123456789abcdef")
    arrays: Arrays | WrittenByAll = learner.state()
    if learner.is_sharded:
        parts = CheckpointShard(
            list(learner.pieces()),
            files.ARRAYS,
            files.file_of,
            communicator.rank,
            several_hosts=True,
        )
        arrays = WrittenByAll(parts, range(1, communicator.size), hosts, name)
        if communicator.rank:
            write_parts(parts, run, name, lambda: False)
    found = {}
    if communicator.rank == 0:
        run.mkdir()
        folder = files.write(run, now, arrays, {})
        found = {
            file: hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in files.ARRAYS
        }
    return communicator.allgather_object(found)[0]


def altered(communicator: Communicator, stage: str) -> str:
    """Returns the error that is raised if the last rank's part of the optimizer state differs from
    its copy on the other host."""
    words = f"{MLP} shard.stage={stage} shard.group=node optim.name=sgd optim.momentum=0.9"
    learner: Any = build_learner(
        configure(None, words.split()), without_statistics((8, 8, 1), 10), communicator
    )
    hyper = Hyper(0.1, 0.9, 0.0, 8, 0)
    batch = {"x": np.zeros((2, 8, 8, 1), np.uint8), "y": np.zeros(2, np.int64)}
    learner.step([learner.to_device(batch)], hyper, 0)
    learner.sync_buffers(communicator)
    hosts = [f"n{1 + rank // (communicator.size // 2)}" for rank in range(communicator.size)]
    check_equal(communicator, learner, hyper, hosts)
    if communicator.rank == communicator.size - 1:
        parts = (
            piece
            for piece in learner.pieces()
            if not piece.is_whole and piece.name.startswith("s.")
        )
        largest = max(parts, key=lambda piece: piece.stop - piece.start)
        largest.read().reshape(-1)[0] += 1  # of the CPU: the optimizer's own memory
    try:
        check_equal(communicator, learner, hyper, hosts)
    except Diverged as error:
        return f"{error.what} / {error.where}"
    return ""


def sleeping(engine: str) -> None:
    """Ends as a job does in which rank 1 does not leave a block."""

    def train(rank: ConnectedRank) -> None:
        def sleep(learner: Any) -> None:
            rank.heartbeat.limit = "stall_s"
            rank.heartbeat.under_way = learner.under_way
            if rank.communicator.rank:
                learner.model.blocks[1][1].register_forward_hook(lambda *_: time.sleep(3600))

        words = EMPTY_SHARES.replace(
            "model.name=mlp model.widths=[9,7]", "model.name=layers_on_ranks:Blocks"
        )
        invariance.losses(f"{words} shard.stage=3", rank.communicator, sleep, rank.heartbeat)

    try:
        on_connected_ranks(
            train, None, [f"comm.engine={engine}", "guard.stall_s=8", "batch.size=2"]
        )
    except RankFailed as failed:
        sys.exit(failed.code)


def curves(communicator: Communicator, folder: str, stages: str, *how: str) -> dict[str, Any]:
    """Returns curves by job and stage. how: few: some jobs; muon: jobs with optim.name=muon; nodes:
    half of the ranks on each of two hosts; jax: jobs of that framework, and the files of a
    checkpoint in `folder`. "averaged" is the first job with reductions that give the mean over
    ranks, which the test must notice.
    """
    group = " shard.group=node" if "nodes" in how else ""
    results: dict[str, Any] = {}
    jobs = jobs_of(*how)
    for stage in stages.split(","):
        for job, options in jobs.items():
            results[f"{job}, stage {stage}"] = invariance.losses(
                f"{options} shard.stage={stage}{group}", communicator
            )
        if "jax" in how:
            results[f"files, stage {stage}"] = checkpoint(
                Path(folder, stage),
                f"{JAX_JOBS['mlp, novograd']} shard.stage={stage}",
                communicator,
            )
    # compared on these ranks: each estimates it from its own gradient
    if "jax" in how and communicator.size > 1 and of_this_copy([NOISE_SCALE]):
        stages_and_none = ["0", *(stage for stage in stages.split(",") if stage != "3")]
        results["noise scales"] = {
            s: invariance.losses(f"{NOISE_SCALE} shard.stage={s}", communicator)["noise_scales"]
            for s in stages_and_none
        }
    if (
        communicator.name == "mpi" and not group and FEW[0] in jobs
    ):  # groups are not the communicator that averages
        if dist.is_initialized():
            dist.destroy_process_group()  # the next one is over the communicator that averages
        last = f"{jobs[FEW[0]]} shard.stage={stages[-1]}{group}"
        results["averaged"] = invariance.losses(last, Averaged(communicator))
    if group:
        results["altered"] = {stage: altered(communicator, stage) for stage in stages.split(",")}
    return results
