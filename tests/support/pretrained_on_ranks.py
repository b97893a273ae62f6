"""Jobs with frozen layers that begin with the weights of a run, on the ranks of this start."""

from __future__ import annotations

from pathlib import Path

from ranks import HIGHEST_STAGE, of_this_copy

import hvdtrain

JOB = (
    "model.name=convnet model.widths=[3,4] batch.size=60 batch.evaluate=90 optim.name=sgd "
    "optim.base_lr=0.1 speed.precision=fp64 "
)
JOB += "log.display=lines"
FROZEN = "model.freeze=['conv*','norm*']"
WAYS = ["", "shard.stage=1", "shard.stage=2 optim.ema=0.9", HIGHEST_STAGE]


def frozen_jobs(folder: str, weights: str) -> None:
    """One after the other, each stopped and resumed."""
    for number, way in enumerate(WAYS):
        words = [
            *JOB.split(),
            *way.split(),
            FROZEN,
            f"model.weights={weights}",
            "comm.engine=mpi",
            "optim.momentum=0.9",
        ]
        for steps in (4, 9):
            hvdtrain.train({"run": str(Path(folder) / f"{number}"), "stop.steps": steps}, *words)


THAW = "[{at: 4steps, names: ['conv2*', 'norm2*']}, {at: 7steps, names: ['conv1*']}]"
THAWED = f"model.freeze=['conv*','norm*'] model.thaw={THAW}"
THAW_WAYS = [*WAYS[:2], "shard.stage=2", HIGHEST_STAGE, "optim.name=adamw optim.base_lr=0.01"]


def thawed_words(way: str) -> list[str]:
    return [
        *JOB.split(),
        "model.freeze=['conv*','norm*']",
        f"model.thaw={THAW}",
        "optim.momentum=0.9",
        "optim.clip_norm=0.5",
        "norm.kind=sync",
        *way.split(),
    ]


def thawed_jobs(folder: str) -> None:
    """One after the other, each stopped between two steps at which weights are thawed, and
    resumed."""
    for number, way in enumerate(THAW_WAYS):
        for steps in (5, 9):
            hvdtrain.train(
                {"run": str(Path(folder) / f"{number}"), "stop.steps": steps},
                *thawed_words(way),
                "comm.engine=mpi",
            )


LORA = (
    "model.name=mlp model.widths=[16,16] model.lora_train=['head*'] model.lora=['fc2'] "
    "model.lora_rank=3 model.lora_alpha=6"
)
LORA_WAYS = [
    "",
    "shard.stage=1",
    "shard.stage=2 optim.ema=0.9",
    HIGHEST_STAGE,
    *of_this_copy(["parallel.pipeline=2 batch.micro=15"]),
]


def adapted_jobs(folder: str) -> None:
    """One after the other, each stopped and resumed."""
    for number, way in enumerate(LORA_WAYS):
        words = [
            *JOB.split()[2:],
            *LORA.split(),
            *way.split(),
            "comm.engine=mpi",
            "optim.momentum=0.9",
        ]
        for steps in (4, 9):
            hvdtrain.train({"run": str(Path(folder) / f"{number}"), "stop.steps": steps}, *words)


def library_jobs(folder: str) -> None:
    """A model of transformers with the weights of its folder, on all ranks and in parts; each
    stopped and resumed."""
    for number, way in enumerate(("", HIGHEST_STAGE)):
        words = [
            *LIBRARY,
            f"model.name=transformers:{folder}",
            f"model.weights={folder}",
            *way.split(),
            "comm.engine=mpi",
        ]
        for steps in (2, 5):
            hvdtrain.train({"run": f"{folder}-{number}", "stop.steps": steps}, *words)


LIBRARY = [
    "batch.size=60",
    "optim.name=sgd",
    "optim.base_lr=0.05",
    "optim.momentum=0.9",
    "speed.precision=fp64",
    "log.display=lines",
]
