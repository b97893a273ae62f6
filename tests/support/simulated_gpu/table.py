"""The jobs that run on simulated GPUs, and what the host waits for in a step of each."""

from __future__ import annotations

from typing import NamedTuple

from combinations import MODELS

STEPS = 5
WARM_UP = 2  # steps in which torch and hvdtrain allocate what they keep
WINDOW = 4  # steps between two sync points of the job that has several
SGD = "sgd optim.base_lr=0.05"
MLP = "model.name=mlp model.widths=[24,16]"
GPT = (
    "task.name=language data.name=digit_tokens:windows model.name=gpt model.layers=2 "
    "model.heads=2 model.width=16"
)
SMALL_GPT = f"{GPT} batch.size=7 batch.micro=2 batch.evaluate=50"


class Job(NamedTuple):
    """A job of one process."""

    kind: str  # as in jobs.py
    words: str
    waits: float = 0  # of the main thread for the device, in each step


def train(words: str, waits: float = 0, rule: str = SGD) -> Job:
    return Job("train", f"{words} max_steps={STEPS} optim.name={rule}", waits)


def memory(words: str) -> Job:
    """Compared with plan --memory too. The data set stays on the host."""
    words = f"{words} data.resident=false max_steps=3 optim.name=adamw optim.base_lr=0.001"
    return Job("memory", words)


ALONE = {
    "classification": train(MLP),
    "norms": train("model.name=wide_resnet model.widths=[2,2,2,2] model.dropout=0"),
    "synchronized norms": train("model.name=convnet model.widths=[3,4] norm.kind=sync"),
    "four steps without a wait": Job(
        "train",
        f"{MLP} data.resident=false max_steps=12 log.every_steps={WINDOW} optim.name={SGD}",
    ),
    "recipe": train(
        "model.name=linear optim.clip_norm=2 model.label_smoothing=0.1 recipe.sample_noise=0.5 "
        "optim.base_batch=24 recipe.growth=milestones recipe.grow_at=[0.1] recipe.grow_to=[47]"
    ),
    "micro-batches": train(f"{MLP} batch.micro=4"),
    "augmentation": train(
        "model.name=convnet model.widths=[3,4] model.norm=false augment.crop=1 augment.flip=true "
        "augment.cutmix=1.0"
    ),
    "adamw, average": train(f"{MLP} optim.ema=0.9", rule="adamw optim.base_lr=0.01"),
    "language": train(SMALL_GPT),
    "dropout": train(f"{SMALL_GPT} model.residual_dropout=0.1"),
    "segmentation": train(MODELS["masks"]),
    "several labels": train(MODELS["labels"]),
    "regression": train(MODELS["numbers"]),
    "several inputs": train(MODELS["fields"]),
    "padding": train(f'{MODELS["sequences"]} data.pad={{"tokens":0}} batch.size=12'),
    "packing": train(f"{MODELS['sequences']} data.pack=16 batch.size=12"),
    "LoRA": train("model.name=mlp model.widths=[16,16] model.lora=['fc2'] model.lora_rank=3"),
    "metrics": train(f"{MODELS['mlp']} task.name=example_objects:measured", waits=5),
    "a loop": Job("loop", ""),
    "a loop of tokens": Job("loop", "gpt"),
    "Horovod's optimizer": Job("horovod", "optimizer"),
    "Horovod's groups": Job("horovod", "groups"),
    "Horovod's calls": Job("calls", ""),
    "memory, mlp": memory("model.name=mlp model.widths=[300,300]"),
    "memory, gpt": memory(
        f"{GPT} model.width=48 batch.size=4 batch.evaluate=50 data.val_samples=50"
    ),
}


# of benchmarks/gpu.py
PARTS = ("waits", "digests", "segmentation", "checkpoint", "pipelines", "buckets")


class RanksJob(NamedTuple):
    """A job of two ranks."""

    kind: str
    words: str
    like: str  # the job of one process that has the same losses
    waits: dict[str, float]  # by engine
    # With NCCL, in a step: collectives and messages of the host with other ranks
    exchanges: int
    engines: tuple[str, ...]
    start: float  # the most memory of the start, as a share of what stays


def on_two(
    like: str,
    words: str = "",
    mpi: float = 0,
    torchdist: float = 0,
    exchanges: int = 0,
    start: float = 1.02,
) -> RanksJob:
    """mpi, torchdist: waits in a step. start: memory; 1.02 for rounding to 512 bytes."""
    waits = {"mpi": mpi, "torchdist": torchdist}
    job = ALONE[like]
    # the memory is NCCL's; plan --memory takes seconds for a rank
    engines = ("torchdist",) if job.kind == "memory" else ("mpi", "torchdist")
    words = f"{job.words} {words}".strip()
    return RanksJob(job.kind, words, like, waits, exchanges, engines, start)


# A larger `start` than 1.02: the whole model is there first, or several copies of a layer.
# With MPI a rank waits for each copy to the host that MPI reads before the step goes on.
ON_TWO = {
    "plain": on_two("classification"),
    "four steps without a wait": on_two("four steps without a wait"),
    "buckets": on_two("classification", "comm.reduce=bucket comm.bucket_mb=0.001"),
    "micro-batches": on_two("micro-batches"),
    "synchronized norms": on_two("synchronized norms", exchanges=1),
    "stage 1": on_two("classification", "shard.stage=1", mpi=1),
    "stage 2": on_two("classification", "shard.stage=2", mpi=1),
    "stage 3": on_two("classification", "shard.stage=3", mpi=1, exchanges=1),
    "stage 3 of blocks": on_two("language", "shard.stage=3", mpi=1, exchanges=1),
    "tensor": on_two("language", "parallel.tensor=2", mpi=26, exchanges=1),
    "pipeline": on_two("language", "parallel.pipeline=2", mpi=5, exchanges=1),
    "segmentation": on_two("segmentation", exchanges=1),
    "padding": on_two("padding", exchanges=1),
    "packing": on_two("packing", exchanges=1),
    "LoRA": on_two("LoRA"),
    "several inputs": on_two("several inputs"),
    "a loop": on_two("a loop"),
    "a loop, stage 2": on_two("a loop", "shard.stage=2"),
    "a loop, stage 3": on_two("a loop", "shard.stage=3"),
    "a loop of tokens, tensor": on_two("a loop of tokens", "parallel.tensor=2"),
    "a loop of tokens, pipeline": on_two("a loop of tokens", "parallel.pipeline=2"),
    # with MPI a copy to the host for each batch of gradients, for the loss, and for norms
    "Horovod's optimizer": on_two("Horovod's optimizer", mpi=2),
    "Horovod's groups": on_two("Horovod's groups", mpi=6),
    "Horovod's calls": on_two("Horovod's calls"),
    "memory, stage 1": on_two("memory, mlp", "shard.stage=1", start=1.06),
    "memory, stage 3": on_two("memory, gpt", "shard.stage=3", exchanges=1, start=1.6),
    "memory, tensor": on_two("memory, gpt", "parallel.tensor=2", exchanges=1, start=1.45),
    "memory, pipeline": on_two(
        "memory, gpt",
        "parallel.pipeline=2 batch.micro=2",
        exchanges=1,
        start=1.5,
    ),
}


EACH = [(name, engine) for name, row in ON_TWO.items() for engine in row.engines]
