"""The loss curves of other tasks than classification on one engine, on the ranks.

Words: no_jax: without the jobs of JAX; no_torch_workers: without workers that import torch;
datasets_alone: users' Datasets; own_weights: no rank asks for the tokens of the others, of jobs
with padding alone
"""

from __future__ import annotations

from typing import Any

from invariance import losses

from hvdtrain.comm.communicator import Buffer, Communicator, Op
from hvdtrain.core.extras import extras

NUMBERS = (
    "data.name=own_data:numbers task.name=regression model.name=linear optim.base_lr=0.02 "
    "max_steps=12"
)
CLASSES = "data.name=own_data:classes model.name=linear optim.base_lr=0.5 max_steps=12"
PARTLY = f"{CLASSES} data.name=own_data:partly_labelled task.ignore_label=-1"
LABELS = (
    "data.name=own_data:labels task.name=multilabel model.name=linear optim.base_lr=1.0 "
    "max_steps=12"
)
TOKENS = (  # SGD, since Adam hides wrong scales of gradients
    "data.name=own_data:tokens task.name=language model.name=gpt model.layers=1 model.width=8 "
    "model.heads=2 optim.base_lr=0.5 max_steps=12"
)
IMAGES = (
    "data.name=digit_tokens:windows data.levels=6 data.side=4 task.name=language "
    "model.name=gpt model.layers=3 "
    "model.width=8 model.heads=2 "
    "data.samples=131 data.val_samples=47 optim.base_lr=0.5 "
    "max_steps=12"
)
JOBS = {
    "numpy": f"{NUMBERS} framework=numpy",
    "jax": f"{NUMBERS} framework=jax",
    "torch": NUMBERS,
    "torch, micro-batches": f"{NUMBERS} batch.micro=3 data.sampling=partition",
    "numpy, absolute": f"{NUMBERS} framework=numpy task.loss=absolute_error optim.base_lr=0.2",
    "jax, absolute": f"{NUMBERS} framework=jax task.loss=absolute_error optim.base_lr=0.2",
    "torch, absolute": f"{NUMBERS} task.loss=absolute_error optim.base_lr=0.2",
    "numpy, classes": f"{CLASSES} framework=numpy",
    "jax, classes": f"{CLASSES} framework=jax",
    "torch, classes": CLASSES,
    "numpy, partly labelled": f"{PARTLY} framework=numpy batch.micro=4",
    "jax, partly labelled": f"{PARTLY} framework=jax",
    "torch, partly labelled": f"{PARTLY} batch.micro=3",
    "numpy, labels": f"{LABELS} framework=numpy batch.micro=4",
    "jax, labels": f"{LABELS} framework=jax",
    "torch, labels": f"{LABELS} batch.micro=3",
    "padded": f"{TOKENS} task.ignore=0",
    "padded, micro-batches and "
    "buckets": f"{TOKENS} task.ignore=0 batch.micro=2 comm.reduce=bucket comm.bucket_mb=0.001",
    "padded, evaluated within "
    "epochs": f"{TOKENS} task.ignore=0 batch.micro=2 recipe.warmup=300tokens "
    "recipe.schedule=cosine "
    "recipe.floor=0.1 epochs=3 evaluate.every_steps=3 evaluate.samples=13",
    "whole": TOKENS,
    "whole, micro-batches": f"{TOKENS} batch.micro=4",
    "a Dataset with random augmentation": f"{NUMBERS} data.name=own_datasets:noisy",
    "the Dataset, its workers": f"{NUMBERS} data.name=own_datasets:noisy data.workers=1 "
    "batch.micro=3",
    "torch's Dataset with random augmentation": f"{NUMBERS} data.name=own_datasets:noisy_in_torch",
    "torch's Dataset, its "
    "workers": f"{NUMBERS} data.name=own_datasets:noisy_in_torch data.workers=2 "
    "data.sampling=partition",
    "image gpt": IMAGES,
    "image gpt, recomputed": f"{IMAGES} model.recompute=all",
    "image gpt, every second block recomputed, "
    "micro-batches": f"{IMAGES} model.recompute=2 batch.micro=4",
    "the user's own": f"{NUMBERS} data.outputs=1 task.name=own_data:quantile optim.base_lr=0.3",
}


if "multilabel" not in extras():
    JOBS = {job: words for job, words in JOBS.items() if LABELS not in words}
WITHOUT = {
    "no_jax": {job for job in JOBS if "jax" in job},
    "no_torch_workers": {"torch's Dataset, its workers"},
    "datasets_alone": {job for job in JOBS if "Dataset" not in job},
}


class OwnWeights:
    """A communicator whose allreduce of the weights of a step returns what it is given; all else is
    the real communicator's."""

    def __init__(self, communicator: object) -> None:
        self._communicator = communicator

    def __getattr__(self, name: str) -> object:
        return getattr(self._communicator, name)

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        return x if name == "step.weight" else self._communicator.allreduce(x, name, op)


def curves(communicator: Communicator, engine: str, *words: str) -> dict[str, Any]:
    own = "own_weights" in words
    jobs = {
        job: options
        for job, options in JOBS.items()
        if (not own or "padded" in job) and not any(job in WITHOUT.get(word, ()) for word in words)
    }
    if engine == "torchdist":
        jobs = {
            job: options.replace("comm.reduce=bucket", "comm.reduce=ddp")
            for job, options in jobs.items()
        }
    return {
        job: losses(options, OwnWeights(communicator) if own else communicator)
        for job, options in jobs.items()
    }
