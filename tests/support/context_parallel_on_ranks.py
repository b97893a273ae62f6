"""Jobs with parallel.context: their losses, and what they refuse; on ranks of a launcher, or on
threads of this process."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import invariance
import numpy as np
import packing_jobs
import torch
from rank_threads import LIMIT_S, ThreadRank, in_threads
from sequence_jobs import JOB, STEPS, tokens
from torch.nn import functional

import hvdtrain
from hvdtrain.comm.communicator import Communicator, Handle
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.comm.mesh import split_groups
from hvdtrain.comm.threads import ThreadRanks
from hvdtrain.core.arrays import ArrayStream
from hvdtrain.errors import UserError

DATA = (
    "task.name=language data.name=digit_tokens:windows data.side=3 data.samples=600 "
    "data.val_samples=50 optim.name=sgd optim.base_lr=0.05 batch.size=10 batch.micro=3 max_steps=4"
)
GPT = f"{DATA} model.name=gpt model.layers=2 model.heads=4 model.width=24"
TEXTS = (
    "task.name=language data.name=text data.context=16 data.val_share=0.25 "
    f"data.root={Path(__file__).parents[2] / 'CITATION.cff'} "
    "optim.name=sgd optim.base_lr=0.05 batch.size=10 batch.micro=3 stop.steps=6 seed=5 "
    "speed.precision=fp64 model.name=gpt model.layers=2 model.heads=4 model.width=24 "
    "log.samples=2 log.display=lines"
)
JOBS = {
    "gpt": f"{GPT} model.label_smoothing=0.1 optim.clip_norm=0.5",
    "gpt, tied, recomputed": f"{GPT} model.tied=true model.recompute=all",
    "gpt, empty shares": f"{GPT} batch.size=3 batch.micro=1",
    "own model": f"{DATA} model.name=context_parallel_on_ranks:Own",
}


def _bits(x: Any) -> Any:
    """Returns bfloat16, which NumPy does not have, as integers in the same memory."""
    return x.view(torch.int16) if getattr(x, "dtype", None) == torch.bfloat16 else x


class SplitThreadRank(ThreadRank):
    """A thread that is a rank, and can be in groups."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        super().__init__(ranks, rank)
        self.loses = ""  # zeros are sent in messages whose names end so

    def split(self, color: int | None) -> Communicator | None:
        groups = split_groups(self, color)  # type: ignore[arg-type]
        members = groups.group_of(self.rank)
        made = {}
        if members is not None and self.rank == members[0]:
            shared = ThreadRanks(len(members))
            shared.barrier = threading.Barrier(len(members), timeout=LIMIT_S)
            made = {self.rank: shared}
        everyone: list[dict[int, ThreadRanks]] = self.allgather_object(made)
        if members is None:
            return None
        found: Any = SplitThreadRank(everyone[members[0]][members[0]], members.index(self.rank))
        found.loses = self.loses
        return found

    def start_send(self, x: Any, to: int, name: str, tag: int = 0) -> Handle:
        lost = bool(self.loses) and name.endswith(self.loses)
        return super().start_send(_bits(0 * x if lost else x), to, name, tag)

    def start_recv(self, x: Any, source: int, name: str, tag: int = 0) -> Handle:
        return super().start_recv(_bits(x), source, name, tag)

    def side_channel_gather(self, message: str, wait_s: float) -> None:
        return None


def curves_on_threads(
    size: int, names: list[str], options: str, loses: str = ""
) -> dict[str, dict[str, Any]]:
    """Returns the losses of jobs on threads. loses: as SplitThreadRank has it."""

    def of_rank(rank: ThreadRank) -> dict[str, dict[str, Any]]:
        own: Any = SplitThreadRank(rank._ranks, rank.rank)
        own.loses = loses
        return curves(own, names, options, of_threads=True)

    return in_threads(size, of_rank)[0]


def same_weights(learner: Any) -> None:
    """Gives the model weights that do not depend on torch's generator, which threads share."""
    generator = torch.Generator().manual_seed(5)
    arrays = dict[str, np.ndarray]()
    for name, p in learner.model.named_parameters():
        shape = learner.strategy.shard(p).shape
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
        numbers = 0.2 * numbers if len(shape) > 1 else 1 + 0.1 * numbers
        arrays[f"p.{name}"] = numbers.to(learner.forward.precision.weights).numpy()
    shapes = {name: array.shape for name, array in arrays.items()}
    learner.load(ArrayStream(shapes, arrays.items(), is_partial=True))


def curves(
    communicator: Communicator, names: list[str], options: str, *, of_threads: bool = False
) -> dict[str, dict[str, Any]]:
    """Returns the losses of jobs with further words."""
    return {
        name: invariance.losses(
            f"{JOBS[name]} {options}",
            communicator,
            same_weights if of_threads else lambda learner: None,
        )
        for name in names
    }


def resumed_on_ranks(folder: str, run: str, *ways: str) -> int:
    """Trains a gpt of texts in a run folder; each way after the first one resumes it. Rank 0 saves
    the weights."""
    os.chdir(folder)
    found = dict[str, np.ndarray]()
    for way in ways:
        found = trained(run, *way.split(), "comm.engine=mpi", resumes=way != ways[0])
    if placement(os.environ).rank == 0:
        np.savez(f"{run}.npz", **found)
    return 0


def trained(run: str, *words: str, resumes: bool = False) -> dict[str, np.ndarray]:
    """Returns the weights of a gpt of texts, in a run folder."""
    job = {"resume" if resumes else "run": run}
    found: dict[str, np.ndarray] = hvdtrain.train(
        job, *([] if resumes else TEXTS.split()), *words
    ).weights
    return found


def packed_on_ranks(folder: str, *ways: str) -> int:
    """Like packing_jobs.on_ranks(); a way without a name resumes the run of the one before it."""
    os.chdir(folder)
    run = ""
    for way in ways:
        name, *words = way.split(" ")
        found = packed(name or run, *words, "comm.engine=mpi", resumes=not name)
        run = name or run
        if placement(os.environ).rank == 0:
            np.savez(f"{run}.npz", **found)
    return 0


def packed(run: str, *words: str, resumes: bool = False) -> dict[str, np.ndarray]:
    """Returns the weights of a job of packing_jobs, which begins or is resumed."""
    job = {"resume" if resumes else "run": run, "stop.steps": STEPS, "task.name": "language"}
    options = [*JOB, packing_jobs.PACK, f"batch.size={packing_jobs.BATCH}", "batch.micro=2"]
    data = {"train_data": {"tokens": tokens()}, "val_data": {"tokens": tokens(20, 8)}}
    model = packing_jobs.gpt()
    found: dict[str, np.ndarray] = hvdtrain.train(
        job, *options, *words, model=model, **data
    ).weights
    return found


class Own(torch.nn.Module):
    """A user's language model with one layer of attention."""

    def __init__(self, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(vocabulary, 8)
        self.places = torch.nn.Embedding(context, 8)
        self.attention = SelfAttention()
        self.head = torch.nn.Linear(8, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(x + self.attention(x))

    def context_plan(self) -> dict[str, str]:
        return {"attention": "attention", "places": "positions"}


class SelfAttention(torch.nn.Module):
    """Two heads that share their keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = torch.nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inputs(x).split((8, 4, 4), 2)
        q, k, v = (part.unflatten(2, (-1, 4)).transpose(1, 2) for part in (q, k, v))
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True, scale=0.4
        )
        return mixed.transpose(1, 2).flatten(2)


class NoPlan(Own):
    context_plan = property()  # hasattr() says that there is none


class NoSuchModule(Own):
    def context_plan(self) -> dict[str, str]:
        return {"block.*": "attention"}


class NoSuchWay(Own):
    def context_plan(self) -> dict[str, str]:
        return {"attention": "rows"}


class OnlyPositions(Own):
    def context_plan(self) -> dict[str, str]:
        return {"places": "positions"}


class Unnamed(Own):
    """Its attention computes outside of the module that the plan names."""

    def context_plan(self) -> dict[str, str]:
        return {"head": "attention", "places": "positions"}


class NoPositions(Own):
    def context_plan(self) -> dict[str, str]:
        return {"attention": "attention"}


class ByMatrices(Own):
    """Its attention does not call torch's."""

    def __init__(self, context: int, vocabulary: int) -> None:
        super().__init__(context, vocabulary)
        self.attention = Products()


class Products(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(1, 2)
        seen = torch.ones_like(scores, dtype=torch.bool).tril()
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ x


class Normed(Own):
    """Its batch norm would have the statistics of a rank's positions, but only in training."""

    def __init__(self, context: int, vocabulary: int) -> None:
        super().__init__(context, vocabulary)
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm((x + self.attention(x)).mT).mT)


class OfFixedLength(Own):
    """Its code contains the number of positions."""

    def __init__(self, context: int, vocabulary: int) -> None:
        super().__init__(context, vocabulary)
        self._context = context

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens.view(-1, self._context))


class OfTwoTypes(Own):
    """Its queries are in float32 under autocast, too."""

    def __init__(self, context: int, vocabulary: int) -> None:
        super().__init__(context, vocabulary)
        self.attention = Rotated()


class WithMask(Own):
    def __init__(self, context: int, vocabulary: int) -> None:
        super().__init__(context, vocabulary)
        self.attention = Masked()


class Rotated(SelfAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inputs(x).split((8, 4, 4), 2)
        q, k, v = (part.unflatten(2, (-1, 4)).transpose(1, 2) for part in (q.float(), k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)


class Masked(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        heads = x[:, None]
        return functional.scaled_dot_product_attention(heads, heads, heads, seen)[:, 0]


def layers_that_differ(by: str) -> list[str]:
    """Returns the errors of two threads, of which the second skips a layer."""

    def of_rank(rank: ThreadRank) -> str:
        own: Any = SplitThreadRank(rank._ranks, rank.rank)

        def skip(learner: Any) -> None:
            if rank.rank:
                learner.model.blocks[1].attention.forward = lambda x, cache, seen=None: x

        try:
            invariance.losses(f"{GPT} parallel.context=2 parallel.context_by={by}", own, skip)
        except UserError as error:
            return str(error)
        return ""

    return in_threads(2, of_rank)


def refusals_on_threads(jobs: list[str]) -> list[str]:
    """Returns the message of each job, words of a configuration, on two threads."""

    def of_rank(rank: ThreadRank) -> list[str]:
        own: Any = SplitThreadRank(rank._ranks, rank.rank)
        return [refusal(own, job) for job in jobs]

    return in_threads(2, of_rank)[0]


def refusal(communicator: Communicator, words: str) -> str:
    try:
        invariance.losses(f"{DATA} parallel.context=2 {words}", communicator)
    except UserError as error:
        return str(error)
    return ""
