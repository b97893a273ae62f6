"""The loss curves of several jobs on one engine, on the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ranks import implemented, jobs_of_this_copy

from hvdtrain.comm.communicator import Buffer, Communicator, CompletedHandle, Handle, Op
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import digest
from hvdtrain.events.log import Event, Log
from hvdtrain.training.build import build_learner
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.job import make_job
from hvdtrain.training.loop import evaluate, evaluate_and_record, train_to_sync_point
from hvdtrain.training.progress.triggers import evaluation_due
from hvdtrain.training.replicas.broadcast import broadcast_state
from hvdtrain.training.start import begin

# 31 does not divide among 2, 3 or 4 ranks, nor 1,437 samples among steps of 31: every share is
# uneven, and steps straddle epochs. ranks that differ are wanted here, for a while or for good:
# this test compares them itself
COMMON = (
    "speed.precision=fp64 batch.size=31 epochs=2 max_steps=60 log.every_steps=1 recipe.warmup=0.5 "
    "optim.weight_decay=1e-3 "
    "guard.equal_steps=null"
)
GROWN = (  # a recipe with nearly everything
    "model.name=linear optim.name=lars optim.trust=0.1 optim.base_lr=0.05 optim.base_batch=24 "
    "optim.clip_norm=2 optim.clip_value=0.05 "
    "model.label_smoothing=0.1 recipe.sample_noise=0.5 recipe.growth=milestones "
    "recipe.grow_at=[0.4,0.9] recipe.grow_to=[47,62] "
    'optim.groups=[{"names":"*.bias","rate":3,"momentum":0.7},{"names":"fc.*","rate":1.5,"decay":2}]'
)
SYNC = "model.name=convnet model.widths=[3,4] norm.kind=sync optim.base_lr=0.3 max_steps=20"
SEEN = implemented("augment.flip=alternating augment.crop=1 augment.pad=reflect evaluate.views=6")
MIXED = implemented(
    "model.name=linear optim.base_lr=0.05 augment.flip=true augment.rand_augment=1 "
    "augment.color_jitter=[0.4,0.4] augment.erase=0.5 "
    "augment.cutmix=1.0"
)
ALL = {
    "numpy softmax": f"framework=numpy model.name=linear optim.base_lr=0.05 {SEEN}",
    "torch softmax": f"model.name=linear optim.base_lr=0.05 {SEEN}",
    "torch softmax, buckets": "model.name=linear optim.base_lr=0.05 comm.reduce=bucket "
    f"comm.bucket_mb=0.001 {SEEN}",
    "torch softmax, micro-batches": f"model.name=linear optim.base_lr=0.05 batch.micro=3 {SEEN}",
    "torch softmax, partition": "model.name=linear optim.base_lr=0.05 data.sampling=partition "
    f"{SEEN}",
    "numpy least squares": "framework=numpy model.name=linear model.loss=squared_error "
    "optim.base_lr=0.002",
    "torch least squares": "model.name=linear model.loss=squared_error optim.base_lr=0.002",
    "torch mlp": "model.name=mlp model.widths=[24,16] optim.base_lr=0.05",
    "torch with an unused layer": "model.name=faulty:Faulty optim.base_lr=0.05",
    "torch wide_resnet": implemented(
        "model.widths=[2,2,2,2] optim.base_lr=0.02 max_steps=20 evaluate.views=2 optim.ema=0.9"
    ),
    "jax softmax": f"framework=jax model.name=linear optim.base_lr=0.05 {SEEN}",
    "jax convnet, micro-batches": "framework=jax model.name=convnet model.widths=[4,6] "
    "model.norm=false optim.base_lr=0.2 batch.micro=5",
    "torch convnet, sync norm": SYNC,
    "torch convnet, sync norm, buckets": f"{SYNC} comm.reduce=bucket comm.bucket_mb=0.001",
    "torch convnet, sync norm, "
    "grown": f"{SYNC} recipe.growth=milestones recipe.grow_at=[0.1] recipe.grow_to=[77]",
    "numpy, mixed labels": f"framework=numpy {MIXED}",
    "torch, mixed labels, micro-batches": f"{MIXED} batch.micro=3",
    "jax, mixed labels": f"framework=jax {MIXED}",
    "numpy, grown": f"framework=numpy {GROWN}",
    "torch, grown": GROWN,
    "torch, grown, buckets and partition": f"{GROWN} comm.reduce=bucket data.sampling=partition",
    "jax, grown": f"framework=jax {GROWN}",
    "torch mlp, RMSprop": "model.name=mlp model.widths=[24,16] optim.name=torch.optim.RMSprop "
    "optim.base_lr=0.001",
    "torch mlp, buckets and "
    "micro-batches": "model.name=mlp model.widths=[24,16] optim.base_lr=0.05 comm.reduce=bucket "
    "batch.micro=4",
}
JOBS = jobs_of_this_copy(ALL)
FEW = {  # one of each way to reduce and of each framework, and what they are compared with
    job: JOBS[job]
    for job in (
        *(
            "numpy softmax",
            "torch softmax, buckets",
            "jax softmax",
            "numpy least squares",
            "torch with an unused layer",
        ),
        *("torch mlp", "torch mlp, buckets and micro-batches", "torch wide_resnet", "numpy, grown"),
        *(
            "torch, grown, buckets and partition",
            "torch convnet, sync norm",
            "torch convnet, sync norm, buckets",
        ),
        *(
            "torch convnet, sync norm, grown",
            "numpy, mixed labels",
            "torch, mixed labels, micro-batches",
        ),
    )
    if job in JOBS
}
FEW_JAX = {
    job: words
    for job, words in JOBS.items()
    if job not in ("jax convnet, micro-batches", "jax, grown", "jax, mixed labels")
}


class Unreduced:
    """A communicator whose allreduce of gradients returns what it is given; all else is the real
    communicator's."""

    def __init__(self, communicator: object) -> None:
        self._communicator = communicator

    def __getattr__(self, name: str) -> object:
        return getattr(self._communicator, name)

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        return x if name.startswith("gradient") else self._communicator.allreduce(x, name, op)

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        return CompletedHandle(x)


def losses(
    words: str,
    communicator: object,
    change: Callable[[Any], None] = lambda learner: None,
    heartbeat: Heartbeat | None = None,
) -> dict[str, object]:
    """Returns the mean loss of every step over all ranks, the evaluations, and the number of
    different states with which the ranks ended.

    change(learner) makes the faulty variant of a job; heartbeat: the watchdog's, if there is one.
    """
    config = configure(None, f"{COMMON} {words}".split())
    datasets = open_datasets(config, communicator)
    learner = build_learner(config, datasets.task, communicator)
    broadcast_state(communicator, learner, None)
    change(learner)
    curve: list[float] = []
    noise_scales: list[float] = []
    evaluations: list[float] = []

    def record_loss(event: Event) -> None:
        if event.kind == "step":
            curve.append(event.fields["loss"])
            noise_scales.append(event.fields.get("noise_scale"))
        if event.kind == "epoch":
            evaluations.append(event.fields["val_loss"])

    now = begin(config, datasets)
    job = make_job(
        config,
        datasets,
        communicator,
        learner,
        signals=Signals(0),
        heartbeat=heartbeat or Heartbeat(),
        log=Log([record_loss]),
        start=now,
        run=None,
    )
    while now.progress.step < config.stop.steps - 1:
        now = train_to_sync_point(job, now)
        if config.evaluate.every_steps and evaluation_due(config, now):
            now = evaluate_and_record(job, now)
    sync_buffers = learner.sync_buffers
    learner.sync_buffers = lambda communicator: None
    now = train_to_sync_point(job, now)  # each rank keeps its own statistics
    apart = communicator.allgather_object(
        {
            name: array
            for name, array in learner.state().items()
            if name.endswith(("running_mean", "running_var"))
        }
    )
    sync_buffers(communicator)
    val = evaluate(job, now)
    state = learner.state()
    not_synced = [
        float(np.abs(sum(one[name] for one in apart) / communicator.size - state[name]).max())
        for name in apart[0]
    ]
    spread = [float(np.abs(apart[0][name] - apart[-1][name]).max()) for name in apart[0]]
    digests = set(communicator.allgather_object(digest(state)))
    return {
        "losses": curve,
        "evaluations": evaluations,
        "noise_scales": noise_scales,
        "val": {name: np.asarray(val[name]).tolist() for name in ("count", *datasets.task.sums)},
        "weights": float(sum(np.abs(a).sum() for a in state.values())),
        "digests": len(digests),
        "not_synced": not_synced,
        "spread": spread,
    }


def curves(
    communicator: Communicator, engine: str, how: str = "", names: list[str] | None = None
) -> dict[str, Any]:
    """By job; names: of some. how: few: FEW; few_jax: one job of JAX, which compiles for seconds on
    each rank; unreduced: gradients are not added up."""
    used = Unreduced(communicator) if how == "unreduced" else communicator
    jobs = {"few": FEW, "few_jax": FEW_JAX}.get(how, JOBS)
    if names is not None:
        jobs = {name: jobs[name] for name in names}
    if how == "unreduced":
        jobs = {
            job: words
            for job, words in FEW.items()
            if "softmax" in job or "numpy" in job or "buckets" in job
        }
        # not past the communicator
        jobs = {
            job: f"{words} comm.reduce=bucket" if "torch" in job else words
            for job, words in jobs.items()
        }
    if engine == "torchdist":
        jobs = {
            job: words.replace("comm.reduce=bucket", "comm.reduce=ddp")
            for job, words in jobs.items()
        }
    return {job: losses(words, used) for job, words in jobs.items()}


TIED = (
    "task.name=language data.name=digit_tokens:windows model.name=gpt model.layers=2 "
    "model.heads=2 model.width=8 model.tied=true "
    "optim.name=sgd optim.base_lr=0.05 max_steps=4"
)
SGD = "model.name=mlp model.widths=[24,7] optim.name=sgd optim.base_lr=0.2 max_steps=4"


def curve(communicator: Communicator, words: str) -> dict[str, Any]:
    return losses(words, communicator)
