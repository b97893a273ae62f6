"""Jobs on samples of different lengths, on the ranks of this start; and their steps by hand, one
sample at a time without padding."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from ranks import HIGHEST_STAGE
from torch import nn
from torch.nn import functional

import hvdtrain
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.core.extras import implementation
from hvdtrain.data.sampler import positions_of_rank

SAMPLES = 50
VOCABULARY = 11
BATCH = 12
RATE = 0.3
STEPS = 9
JOB = [
    "optim.name=sgd",
    "optim.momentum=0",
    f"optim.base_lr={RATE}",
    "speed.precision=fp64",
    f"batch.size={BATCH}",
    "log.display=lines",
    "seed=5",
]
PAD_TOKENS = "data.pad={tokens: 0}"
PAD_ROWS = ["data.pad={x: 0, y: -7}", "data.mask={y: real}"]


class NextToken(nn.Module):
    """Logits of each token from the mean of the embeddings up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY + 1, 6)
        self.head = nn.Linear(6, VOCABULARY + 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        sums = self.embedding(tokens).cumsum(1)
        return self.head(
            sums
            / torch.arange(1, tokens.shape[1] + 1, device=tokens.device, dtype=sums.dtype)[:, None]
        )


class OfRows(nn.Module):
    """Computes a number for each row of x (n, T, 3) from this row and the rows before it."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Linear(3, 5)
        self.out = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.row(x).tanh().cumsum(1) / 15)[..., 0]


class OfSentence(nn.Module):
    """Computes scores of two classes from the real tokens of each sample; each token attends to all
    of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.query = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)  # (n, T, 6)
        scores = (self.query(x) @ x.transpose(1, 2)).masked_fill(~mask[:, None], -torch.inf)
        seen = (scores.softmax(2) @ x) * mask[..., None]
        return self.head(seen.sum(1) / mask.sum(1, keepdim=True))


def loss_of_rows(outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """(n,): the mean over the real rows of each sample."""
    errors = (outputs - batch["y"]).square() * batch["real"]
    return errors.sum(1) / batch["real"].sum(1)


def made(kind: type[nn.Module]) -> nn.Module:
    """Returns a model with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind().double()


def tokens(samples: int = SAMPLES, seed: int = 1) -> list[np.ndarray]:
    """Sequences of 1 to 23 tokens, 0 among them."""
    random = np.random.default_rng(seed)
    return [
        random.integers(0, VOCABULARY, length)
        for length in [1, *random.integers(1, 24, samples - 1)]
    ]


def rows(samples: int = SAMPLES, seed: int = 2) -> dict[str, list[np.ndarray]]:
    random = np.random.default_rng(seed)
    x = [random.normal(size=(random.integers(1, 15), 3)) for _ in range(samples)]
    return {"x": x, "y": [one.sum(1) + 0.1 * random.normal(size=len(one)) for one in x]}


def language(
    run: str, *words: str, of: Callable[[list[np.ndarray]], Any] = lambda found: {"tokens": found}
) -> dict[str, np.ndarray]:
    """What a job on tokens trains in STEPS steps, or as words say."""
    data = {"train_data": of(tokens()), "val_data": of(tokens(20, 8))}
    job: dict[str, Any] = {"run": run, "stop.steps": STEPS, "task.name": "language"}
    return dict(
        hvdtrain.train(job, *JOB, PAD_TOKENS, *words, model=made(NextToken), **data).weights
    )


def of_rows(run: str, *words: str) -> dict[str, np.ndarray]:
    data = {"train_data": rows(), "val_data": rows(20, 9)}
    job: dict[str, Any] = {"run": run, "stop.steps": STEPS}
    return dict(
        hvdtrain.train(
            job, *JOB, *PAD_ROWS, *words, model=made(OfRows), loss=loss_of_rows, **data
        ).weights
    )


def mean_of_rows(model: Any, part: Any) -> tuple[torch.Tensor, int]:
    """The mean loss of a part and its samples, which data.pad wants to be told."""
    return loss_of_rows(model(part["x"]), part).mean(), part.count


def own_loop(run: str, *words: str) -> dict[str, np.ndarray]:
    """STEPS steps of a custom loop, every second one in parts of two samples."""
    with hvdtrain.init({"seed": 5}, *PAD_ROWS, "speed.device=cpu", *words) as ctx:
        model: Any = made(OfRows)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
        for batch in ctx.samples(rows(), batch=BATCH, epochs=STEPS * BATCH / SAMPLES, seed=5):
            if ctx.step % 2:
                ctx.accumulate(lambda part: mean_of_rows(model, part), at_most=2)
            else:
                loss, count = mean_of_rows(model, batch)
                ctx.backward(loss, count=count)
            optimizer.step()
        return {
            name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()
        }


def sentences(samples: int = SAMPLES, seed: int = 1) -> dict[str, Any]:
    found = tokens(samples, seed)
    return {"tokens": found, "y": np.array([int(one.sum()) % 2 for one in found])}


def of_sentences(run: str, *words: str) -> dict[str, np.ndarray]:
    data = {"train_data": sentences(), "val_data": sentences(20, 8)}
    job: dict[str, Any] = {
        "run": run,
        "stop.steps": STEPS,
        "data.pad": {"tokens": 0},
        "data.mask": {"tokens": "mask"},
    }
    return dict(hvdtrain.train(job, *JOB, *words, model=made(OfSentence), **data).weights)


WAYS = {
    "language-passes": (language, "batch.micro=3"),
    "language-buckets": (language, "batch.micro=3", "data.bucket_by=length"),
    "language-stage": (language, "batch.micro=4", "data.bucket_by=tokens", "shard.stage=2"),
    "language-stopped": (language, "batch.micro=3", "data.bucket_by=length", "stop.steps=4"),
    "rows": (of_rows,),
    "rows-own-loop": (own_loop,),
    "rows-buckets": (of_rows, "batch.micro=2", "data.bucket_by=y"),
}
HAS_INPUTS = implementation("data.inputs") is not None
if HAS_INPUTS:
    WAYS |= {
        "sentences": (of_sentences,),
        "sentences-buckets": (of_sentences, "batch.micro=5", "data.bucket_by=length"),
        "sentences-stage": (
            of_sentences,
            "batch.size=3",
            "batch.micro=1",
            HIGHEST_STAGE,
            "stop.steps=3",
        ),
    }


def on_ranks(folder: str) -> int:
    """One job after the other on the mpi engine; rank 0 leaves their weights."""
    os.chdir(folder)
    for name, (job, *words) in WAYS.items():
        found = job(name, *words, "comm.engine=mpi")
        if placement(os.environ).rank == 0:
            np.savez(f"{name}.npz", **found)
    return 0


def by_hand(
    model: nn.Module,
    loss: Callable[[nn.Module, int], tuple[torch.Tensor, int]],
    samples: int = SAMPLES,
    batch: int = BATCH,
) -> dict[str, np.ndarray]:
    """Returns the weights after STEPS steps with the mean over each batch; loss(model, sample) is a
    pair of a sum and its weight."""
    model = copy.deepcopy(model)
    for step in range(STEPS):
        drawn = positions_of_rank(step * batch, batch, 0, 1, samples, 5).samples
        found = [loss(model, int(sample)) for sample in drawn]
        total = torch.stack([one for one, _ in found]).sum() / sum(weight for _, weight in found)
        gradients = torch.autograd.grad(total, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(RATE * gradient)
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def language_by_hand() -> dict[str, np.ndarray]:
    found = [torch.from_numpy(one) for one in tokens()]

    def loss(model: nn.Module, sample: int) -> tuple[torch.Tensor, int]:
        one = found[sample]
        logits = model(one[None, :-1])[0]
        return functional.cross_entropy(logits, one[1:], reduction="sum"), len(one) - 1

    return by_hand(made(NextToken), loss)


def sentences_by_hand() -> dict[str, np.ndarray]:
    found = sentences()

    def loss(model: nn.Module, sample: int) -> tuple[torch.Tensor, int]:
        one = torch.from_numpy(found["tokens"][sample])[None]
        label = torch.tensor([int(found["y"][sample])])
        return functional.cross_entropy(
            model(one, torch.ones(one.shape, dtype=torch.bool)), label
        ), 1

    return by_hand(made(OfSentence), loss)


def rows_by_hand() -> dict[str, np.ndarray]:
    found = {name: [torch.from_numpy(one) for one in arrays] for name, arrays in rows().items()}

    def loss(model: nn.Module, sample: int) -> tuple[torch.Tensor, int]:
        return (model(found["x"][sample][None])[0] - found["y"][sample]).square().mean(), 1

    return by_hand(made(OfRows), loss)


class Sequences:
    """A torch Dataset in all but its base class."""

    def __init__(self, samples: list[np.ndarray]) -> None:
        self.samples = samples
        self.values = {"tokens": VOCABULARY}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.from_numpy(self.samples[index])}
