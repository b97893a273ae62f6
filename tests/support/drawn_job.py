"""A job drawn from a seed: its words, where it runs, and where it resumes; and the data and the
model that its words name.

Jobs compute in float64. They use no feature whose numbers depend on the ranks by definition: no
dropout, no statistics of one rank's samples, no local steps. Features that a place does not support
are rarely drawn for it, so most jobs train.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from ranks import implemented, of_this_copy
from torch import nn

from hvdtrain.config.schema import known_keys

VOCABULARY = 11
RATES = {  # so that a few steps change the loss, and none diverges
    **{
        "sgd": 0.05,
        "adam": 0.01,
        "adamw": 0.01,
        "lars": 0.05,
        "larc": 0.02,
        "lamb": 0.02,
        "novograd": 0.02,
        "muon": 0.02,
    },
    **{
        "torch.optim.SGD": 0.05,
        "torch.optim.RMSprop": 0.002,
        "torch.optim.Adam": 0.01,
        "torch.optim.NAdam": 0.005,
    },
    **{"torch.optim.Adagrad": 0.01, "torch.optim.Adamax": 0.005},
}
# Batches that no number of classes divides. The linear model starts with zeros, so all its outputs
# are equal. If each class had equally many samples, the gradient of a bias would be zero except for
# rounding; Adam would divide it by itself, and the difference would exceed OF_ADAM.
NOT_DIVISIBLE = (11, 13, 17, 19, 23, 29)


class Place(NamedTuple):
    """Where a job runs, and in which parts."""

    engine: str
    ranks: int
    words: str


class DrawnJob(NamedTuple):
    seed: int
    words: str
    place: Place
    next_place: Place | None  # where it resumes from its checkpoint after `steps` steps
    steps: int


class Limits(NamedTuple):
    """What is drawn from."""

    engines: Sequence[str] = ("mpi", "torchdist", "horovod")
    sizes: Sequence[int] = (2, 2, 2, 3, 3, 4)
    frameworks: Sequence[str] = ("torch",) * 7 + ("jax", "jax", "numpy")


def draw(seed: int, limits: Limits) -> DrawnJob:
    dice = random.Random(seed)
    framework = dice.choice(limits.frameworks)
    chosen = [pair for pair in MODELS[framework] if of_this_copy([WORDS_OF_MODEL.get(pair[1], "")])]
    task, model = dice.choice(chosen)
    model = f"{model}-{dice.choice('ab')}" if model in ("mlp", "gpt") else model
    batch = dice.randint(6, 30)
    samples = dice.randint(35, 120)
    steps = dice.randint(5, 9)
    if (task, model) == ("classification", "linear"):
        batch = dice.choice(NOT_DIVISIBLE)
    optimizer = dice.choice(
        [
            name
            for name in RATES
            if framework == "torch" or ("." not in name and (framework == "jax" or name != "muon"))
        ]
    )
    options = _Options(dice, framework, task, model, optimizer, batch, samples, steps)
    at = dice.randint(1, 3)
    words = " ".join(
        [
            f"checkpoint.every_steps={at}",
            *options.common(),
            *options.optimizer(),
            *options.recipe(),
            *options.inputs(),
        ]
    )
    words = " ".join([words, *options.others(random.Random(f"others {seed}"), words)])
    place = _place(dice, limits, framework, model, optimizer, words)
    next_place = (
        _place(dice, limits, framework, model, optimizer, words) if dice.random() < 0.5 else None
    )
    return DrawnJob(seed, words, place, next_place, at)


MODELS = {  # framework -> tasks and models
    "torch": [
        *(
            ("classification", model)
            for model in (
                "mlp",
                "mlp",
                "linear",
                "convnet",
                "convnet",
                "sync",
                "alexnet",
                "own",
                "own",
            )
        ),
        *(("regression", "mlp"), ("regression", "linear"), *[("language", "gpt")] * 3),
    ],
    "jax": [
        *(("classification", model) for model in ("mlp", "linear", "convnet")),
        ("regression", "mlp"),
        ("regression", "linear"),
    ],
    "numpy": [("classification", "linear"), ("regression", "linear")],
}
WORDS_OF_MODEL = {
    "mlp-a": "model.name=mlp model.widths=[12]",
    "mlp-b": "model.name=mlp model.widths=[10,8,6]",
    "linear": "model.name=linear",
    "convnet": "model.name=convnet model.widths=[3,4]",
    "sync": "model.name=convnet model.widths=[3,4] norm.kind=sync",
    "alexnet": "model.name=alexnet model.widths=[3,4,3,2,5] model.dense=[7,5] model.dropout=0",
    "own": "model.name=drawn_job:Net",
    "gpt-a": "model.name=gpt model.layers=2 model.heads=2 model.width=8",
    "gpt-b": "model.name=gpt model.layers=3 model.heads=2 model.width=8 model.tied=true",
}


class _Options:
    """Draws the words of a job, section by section."""

    def __init__(
        self,
        dice: random.Random,
        framework: str,
        task: str,
        model: str,
        optimizer: str,
        batch: int,
        samples: int,
        steps: int,
    ) -> None:
        self.dice = dice
        self.framework = framework
        self.task = task
        self.model = model
        self.name = optimizer
        self.batch = batch
        self.samples = samples
        self.steps = steps
        self.in_torch_alone = "." in optimizer
        self.images = task == "classification" and (
            model not in ("mlp-a", "mlp-b", "linear") or dice.random() < 0.5
        )

    def sometimes(self, share: float, *words: str) -> list[str]:
        return [self.dice.choice(words)] if self.dice.random() < share else []

    def common(self) -> list[str]:
        dice = self.dice
        words = [
            f"framework={self.framework}",
            "speed.precision=fp64",
            f"seed={dice.randint(0, 99)}",
            f"task.name={self.task}",
        ]
        words += [f"batch.size={self.batch}", "log.every_steps=1", "checkpoint.keep_last=99"]
        words += [
            "guard.equal_steps=2",
            "checkpoint.every_minutes=null",
            f"batch.evaluate={dice.choice((3, 7, 500))}",
        ]
        words += [
            f"data.samples={self.samples}",
            f"data.val_samples={dice.randint(5, 30)}",
            WORDS_OF_MODEL[self.model],
        ]
        if self.model == "convnet":
            words += [
                "model.norm=false",
                *self.sometimes(
                    0.5 * (self.framework == "torch"), "model.dense=[7,5]", "model.dense=[6]"
                ),
            ]
        if self.images:
            side = dice.choice(((4, 4, 2), (8, 8, 1), (9, 7, 3)))
            words += [
                "data.name=synthetic",
                f"data.shape=[{','.join(map(str, side))}]",
                f"data.classes={dice.randint(2, 7)}",
            ]
        else:
            words += [
                f"data.name=drawn_job:{ {'classification': 'classes', 'regression': 'numbers', 'language': 'tokens'}[self.task] }"  # noqa: E501
            ]
        by_steps = [f"stop.steps={self.steps}", "epochs=50"]
        return words + dice.choice(
            (by_steps, [f"epochs={self.steps * self.batch / self.samples:.3f}"])
        )

    def optimizer(self) -> list[str]:
        words = [f"optim.name={self.name}", f"optim.base_lr={RATES[self.name]}"]
        words += self.sometimes(0.4, "optim.weight_decay=0.01", "optim.weight_decay=0.1")
        words += self.sometimes(0.2, "optim.exclude=none") + self.sometimes(
            0.3, "optim.clip_norm=0.5", "optim.clip_norm=0.05"
        )
        words += self.sometimes(0.2, "optim.clip_value=0.02") + self.sometimes(
            0.2, "optim.momentum=0.5", "optim.momentum=0"
        )
        if not self.in_torch_alone:
            words += self.sometimes(0.2, "optim.ema=0.8")
            if self.model != "own":
                words += self.sometimes(
                    0.15,
                    'optim.groups=[{"names":"*.bias","rate":3}]',
                    'optim.groups=[{"names":"*.weight","rate":2}]',
                )
        return words

    def recipe(self) -> list[str]:
        dice = self.dice
        words = self.sometimes(
            0.3, "recipe.warmup=0.3", "recipe.warmup=2steps", "recipe.warmup=20%"
        )
        schedules = (
            "cosine",
            "linear",
            "polynomial",
            "exponential",
            "steps recipe.milestones=[2steps] recipe.gamma=0.5",
        )
        words += self.sometimes(0.5, *(f"recipe.schedule={name}" for name in schedules))
        if self.model != "sync" and dice.random() < 0.25:
            larger = dice.randint(self.batch + 1, min(2 * self.batch, self.samples))
            words.append(
                f"recipe.growth=milestones recipe.grow_at=[2steps] recipe.grow_to=[{larger}]"
            )
        if self.task != "language" and dice.random() < 0.15:
            words.append(f"optim.base_batch={max(1, self.batch // 2)} recipe.sample_noise=0.5")
        words += self.sometimes(
            0.2, "guard.nonfinite=skip", *["guard.nonfinite=rollback"] * (not self.in_torch_alone)
        )
        return words + self.sometimes(0.1, "recipe.gradient_noise=0.01")

    def inputs(self) -> list[str]:
        words = self.sometimes(0.3, "data.sampling=partition") + self.sometimes(
            0.3, "evaluate.every_steps=2", "evaluate.every_steps=3"
        )
        words += self.sometimes(0.2, "evaluate.samples=4")
        if self.model != "sync":
            words += self.sometimes(0.4, "batch.micro=2", "batch.micro=3", "batch.micro=5")
        if self.task == "classification":
            words += self.sometimes(0.2, "model.label_smoothing=0.1", "model.loss=squared_error")
        if self.images:
            words += self.sometimes(
                0.2, "augment.flip=true", "augment.flip=alternating"
            ) + self.sometimes(0.2, "augment.crop=1")
            words += (
                self.sometimes(0.1, "augment.cutout=2")
                + self.sometimes(0.1, "augment.mixup=0.3")
                + [*map(implemented, self.sometimes(0.15, "evaluate.views=2"))]
            )
        if self.model.startswith("gpt"):
            words += self.sometimes(0.2, "model.recompute=all") + self.sometimes(
                0.3, "task.ignore=0"
            )
        return words

    def others(self, dice: random.Random, words: str) -> list[str]:
        """Draws words of features that were added later from a separate generator, so a seed keeps
        its other words."""
        found = ["hooks=[example_objects:Hook]"] if dice.random() < 0.15 else []
        if dice.random() < 0.15 and self.framework == "torch" and self.model != "own":
            found.append('model.freeze=["*bias"]')
        by_weight = self.task == "classification" and not any(
            word in words
            for word in ("data.sampling", "augment.mixup", "flip=alternating", "sample_noise")
        )
        kind = dice.choice(("blocks", "weights", "", "", ""))
        if kind == "blocks" and "data.sampling" not in words:
            found.append(
                f"data.shuffle=blocks data.shuffle_block={dice.randint(1, 9)} "
                f"data.shuffle_window={dice.randint(1, 5)}"
            )
        elif kind == "weights" and by_weight:
            found.append(implemented("data.sample_weights=balanced"))
        if self.images:
            for word in (
                "augment.erase=0.5",
                "augment.rand_augment=2",
                "augment.color_jitter=[0.4,0.4]",
            ):
                found += [implemented(word)] if dice.random() < 0.1 else []
            if "sample_weights" not in " ".join(found) and dice.random() < 0.1:
                found.append("augment.cutmix=1.0")
            if "augment.crop" not in words and dice.random() < 0.1:
                found.append("augment.resized_crop=0.5")
        found += [implemented("checkpoint.every=auto")] * (dice.random() < 0.1)
        if self.task == "regression":
            found += [implemented("data.shift=2")] * (dice.random() < 0.2)
            found += ["data.gaps=[y]"] * (dice.random() < 0.2)
        return found


def _place(
    dice: random.Random, limits: Limits, framework: str, model: str, optimizer: str, words: str
) -> Place:
    """With the parts that the engine, the model and the optimizer have; now and then with
    others."""
    engine = dice.choice(limits.engines)
    ranks = dice.choice(limits.sizes)
    parts = [""] if framework != "torch" else ["", "comm.reduce=bucket comm.bucket_mb=0.001"]
    if framework != "numpy":
        parts += (
            ["shard.stage=1", "shard.stage=2 comm.bucket_mb=0.001"]
            if optimizer != "muon" or framework == "torch"
            else []
        )
    if framework == "jax" and optimizer != "muon":
        parts += of_this_copy(["shard.stage=3", "shard.stage=3 shard.reshard=false"])
    if framework == "torch":
        parts += _torch_parts(dice, engine, model, optimizer, words)
    others = _of_this_copy(
        (
            "shard.stage=3",
            "parallel.tensor=2",
            "parallel.pipeline=2",
            "parallel.dense=a",
            "servers.count=1",
        )
    )
    if dice.random() < 0.03 and others:
        parts = [dice.choice(others)]
    return Place(
        engine,
        ranks + ranks % 2 if "=2" in (part := dice.choice(parts)) and "parallel" in part else ranks,
        part,
    )


def _torch_parts(
    dice: random.Random, engine: str, model: str, optimizer: str, words: str
) -> list[str]:
    parts = ["comm.reduce=ddp"] * (engine == "torchdist")
    if "optim.ema" in words:
        return parts
    parts += ["shard.stage=3", "shard.stage=3 shard.reshard=false"] * (engine != "horovod")
    if optimizer == "muon":
        return parts
    stage = dice.choice(("", " shard.stage=1", " shard.stage=2"))
    if model in ("mlp-a", "mlp-b", "gpt-a", "gpt-b"):
        parts += [
            f"parallel.tensor=2{stage}",
            "parallel.tensor=2 shard.stage=3"[: 17 if engine == "horovod" else None],
        ]
        parts += [f"parallel.tensor=2 parallel.sequence=true{stage}"] * model.startswith("gpt")
        if engine != "horovod" and model.startswith("gpt"):
            ways = ("", " parallel.context_by=ulysses")
            parts += [f"parallel.context=2{way}{stage}" for way in ways]
        if engine != "horovod" and "evaluate.views" not in words:
            schedules = [
                f" parallel.schedule={name}"
                for name in ("gpipe", "1f1b", *["zero_bubble"] * ("recompute" not in words))
            ]
            parts += [f"parallel.pipeline=2{schedule}{stage}" for schedule in schedules]
            parts += [f"parallel.pipeline=2 parallel.schedule=interleaved{stage}"] * (
                model in ("mlp-b", "gpt-b")
            )
    if model in ("convnet", "alexnet"):
        parts += [f"parallel.dense={scheme}{stage}" for scheme in "abc"]
    if engine != "horovod" and "." not in optimizer and model != "sync":
        parts += ["servers.count=1"]
    return _of_this_copy(parts)


def _of_this_copy(parts: Sequence[str]) -> list[str]:
    """Without those of an extra that this copy lacks."""
    return [
        part
        for part in of_this_copy(parts)
        if all(word.partition("=")[0] in known_keys() for word in part.split())
    ]


def numbers(split: str, samples: int = 100, val_samples: int = 20) -> dict[str, np.ndarray]:
    """Two numbers that follow from five, with noise."""
    dice, count = _dice_of(split, samples, val_samples)
    x = dice.normal(3.0, 2.0, (count, 5))
    return {
        "x": x,
        "y": x @ np.linspace(-1.0, 1.0, 10).reshape(5, 2) + dice.normal(0.0, 0.3, (count, 2)),
    }


def classes(split: str, samples: int = 100, val_samples: int = 20) -> dict[str, np.ndarray]:
    """Five columns, and which of three sums of them is the largest; the first three samples are of
    three classes."""
    dice, count = _dice_of(split, samples, val_samples)
    x = dice.normal(0.0, 1.0, (count, 5))
    y = (x @ np.linspace(-1.0, 1.0, 15).reshape(5, 3)).argmax(1)
    y[:3] = range(3)
    return {"x": x, "y": y}


def tokens(split: str, samples: int = 100, val_samples: int = 20) -> Any:
    """Windows that count on, by 1 or 2, with zeros at some ends."""
    from hvdtrain.data.source import NamedArrays

    dice, count = _dice_of(split, samples, val_samples)
    found = (
        dice.integers(1, VOCABULARY, (count, 1)) + np.arange(8) * dice.integers(1, 3, (count, 1))
    ) % (VOCABULARY - 1) + 1
    found[np.arange(8) >= dice.integers(3, 12, (count, 1))] = 0
    return NamedArrays(
        {"tokens": found.astype(np.uint16)}, {"tokens": VOCABULARY}, f"tokens, {split}"
    )


def _dice_of(split: str, samples: int, val_samples: int) -> tuple[np.random.Generator, int]:
    return np.random.default_rng(
        ["train", "val"].index(split)
    ), samples if split == "train" else val_samples


class Net(nn.Module):
    """A user's model: blocks, a norm of each sample, a weight that two layers have, a frozen
    parameter, one without use, a buffer."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(math.prod(shape), 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(2)
        )
        self.again = nn.Linear(6, 6)
        self.again.weight = self.first_square = nn.Parameter(torch.eye(6) + 0.1)
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.full((6,), 0.5))
        self.last = nn.Linear(6, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.flatten(1)).relu() @ self.first_square
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.again(x * self.frozen + self.shift)) * self.scale
