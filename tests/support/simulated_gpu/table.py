"""The jobs that run on simulated GPUs, and what the host waits for in a step of each."""

from __future__ import annotations

from typing import NamedTuple

from combinations import MODELS
from parallel_on_ranks import GPT

STEPS = 6
SGD = "sgd optim.base_lr=0.05"
MLP = "model.name=mlp model.widths=[24,16]"


class RanksJob(NamedTuple):
    """A row of the table of two ranks."""

    words: str
    like: str  # the job of one process that has the same losses
    waits: dict[str, float]  # by engine


class Job(NamedTuple):
    """A row of the table."""

    words: str
    waits: float = 0  # of the main thread for the device, in each step


def job(words: str, waits: float = 0, rule: str = SGD) -> Job:
    return Job(f"{words} max_steps={STEPS} optim.name={rule}", waits)


ALONE = {
    "classification": job(MLP),
    "norms": job("model.name=wide_resnet model.widths=[2,2,2,2] model.dropout=0"),
    "synchronized norms": job("model.name=convnet model.widths=[3,4] norm.kind=sync"),
    "recipe": job(
        "model.name=linear optim.clip_norm=2 model.label_smoothing=0.1 recipe.sample_noise=0.5 "
        "optim.base_batch=24 recipe.growth=milestones recipe.grow_at=[0.1] recipe.grow_to=[47]"
    ),
    "micro-batches": job(f"{MLP} batch.micro=4"),
    "augmentation": job(
        "model.name=convnet model.widths=[3,4] model.norm=false augment.crop=1 augment.flip=true "
        "augment.cutmix=1.0"
    ),
    "adamw, average": job(f"{MLP} optim.ema=0.9", rule="adamw optim.base_lr=0.01"),
    "language": job(GPT),
    "dropout": job(f"{GPT} model.residual_dropout=0.1"),
    "segmentation": job(MODELS["masks"]),
    "several labels": job(MODELS["labels"]),
    "regression": job(MODELS["numbers"]),
    "several inputs": job(MODELS["fields"]),
    "padding": job(f'{MODELS["sequences"]} data.pad={{"tokens":0}}'),
    "packing": job(f"{MODELS['sequences']} data.pack=16 batch.size=12"),
    "LoRA": job("model.name=mlp model.widths=[16,16] model.lora=['fc2'] model.lora_rank=3"),
    "metrics": job(f"{MODELS['mlp']} task.name=example_objects:measured", waits=5),
}


def on_two(like: str, words: str = "", mpi: float = 0, torchdist: float = 0) -> RanksJob:
    """mpi, torchdist: waits in a step."""
    waits = {"mpi": mpi, "torchdist": torchdist}
    return RanksJob(f"{ALONE[like].words} {words}", like, waits)


# threads that also use another rank's GPU
WRONG_THREADS = {"mpi": {"hvdtrain-comm"}, "torchdist": set()}
# With MPI a rank waits for each copy to the host that MPI reads before the step goes on.
ON_TWO = {
    "plain": on_two("classification"),
    "buckets": on_two("classification", "comm.reduce=bucket comm.bucket_mb=0.001"),
    "micro-batches": on_two("micro-batches"),
    "synchronized norms": on_two("synchronized norms"),
    "stage 1": on_two("classification", "shard.stage=1", mpi=1),
    "stage 2": on_two("classification", "shard.stage=2", mpi=1),
    "stage 3": on_two("classification", "shard.stage=3", mpi=1),
    "stage 3 of blocks": on_two("language", "shard.stage=3", mpi=1),
    "tensor": on_two("language", "parallel.tensor=2", mpi=50),
    "pipeline": on_two("language", "parallel.pipeline=2", mpi=17, torchdist=16),
    "segmentation": on_two("segmentation"),
    "padding": on_two("padding"),
    "packing": on_two("packing"),
    "LoRA": on_two("LoRA"),
    "several inputs": on_two("several inputs"),
}
