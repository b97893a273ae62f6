"""shard.stage=3 in 16 bits on the ranks: which tensors are alive after a forward pass, and weights
compared with stage 0."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper
from hvdtrain.data.field import Field
from hvdtrain.tasks.classification import without_statistics
from hvdtrain.tasks.language import Language
from hvdtrain.training.build import build_learner

LAYERS = 4
WIDTH = 64
TOKENS = 8
COLOURS = 50
GPT = f"model.name=gpt task.name=language model.layers={LAYERS} model.width={WIDTH} model.heads=2"
LANGUAGE = Language(Field("int64", (TOKENS + 1,), COLOURS))
SMALLEST = WIDTH * COLOURS  # numbers of a weight: activations of one sample have fewer


IMAGES = without_statistics((8, 8, 1), 10)
# samples of a rank
STEPS = 3
LR = 0.5
SHARES = (3, 2)


class Odd(nn.Module):
    """A model that reads some weights in float32: a frozen layer, a router, a matrix without a
    layer, torch's encoder layer, a layer whose weight's norm is computed, and a layer that is
    called only for images of zeros.
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 32)
        self.router = nn.Linear(32, 4)
        self.last = nn.Linear(32, outputs)
        self.rare = nn.Linear(32, 32)
        self.frozen.weight.requires_grad_(False)
        self.experts = nn.Parameter(torch.randn(4, 32, 32) / 6)
        self.encoder = nn.TransformerEncoderLayer(32, 2, 40, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.frozen(x.flatten(1)))
        with torch.autocast(x.device.type, enabled=False):
            shares = self.router(h.float()).softmax(1)
        h = h + (torch.einsum("nd,edf->nef", h, self.experts) * shares.unsqueeze(2)).sum(1)
        # float32: in evaluation torch takes no other on a CPU
        h = self.encoder(h.float().unsqueeze(1)).squeeze(1)
        if x.mean() == 0:
            h = h + self.rare(h)
        outputs: torch.Tensor = self.last(h) * self.last.weight.norm()
        return outputs


class Sixteen(TorchDispatchMode):
    """The storages that operations return in 16 bits, of so many bytes or more."""

    def __init__(self, least_bytes: int) -> None:
        super().__init__()
        self._least = least_bytes
        self._found = dict[int, Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((result, (kwargs or {}).get("out"))):
            if (
                isinstance(leaf, torch.Tensor)
                and leaf.dtype in (torch.bfloat16, torch.float16)
                and leaf.layout == torch.strided
            ):
                storage = leaf.untyped_storage()
                if storage.nbytes() >= self._least:
                    self._found[storage._cdata] = weakref.ref(storage)
        return result

    def alive_bytes(self) -> int:
        storages = [found() for found in self._found.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)


def alive_after_forward(communicator: Communicator, cases: list[str]) -> dict[str, int]:
    """Bytes of weights in 16 bits that this rank has when the second step's forward pass ends, one
    sample a rank."""
    found = {}
    for case in cases:
        learner: Any = build_learner(
            configure(None, f"{GPT} {case}".split()), LANGUAGE, communicator
        )
        batch = {
            name: np.zeros((1, *field.shape), field.dtype)
            for name, field in LANGUAGE.fields.items()
        }
        alive = []
        live = Sixteen(2 * SMALLEST)
        learner.forward._training.register_forward_hook(
            lambda *_, live=live, alive=alive: alive.append(live.alive_bytes())
        )
        with live:
            for step in range(2):
                learner.step(
                    [learner.to_device(batch)], Hyper(0.1, 0.9, 0.0, communicator.size, step), step
                )
        found[case] = alive[-1]
    return found


def apart(communicator: Communicator, cases: list[str]) -> dict[str, Any]:
    """Returns the difference of weights from stage 0's after some steps of SGD, in 16 bits and in
    float32, as shares of the largest change, and the learner's description.
    """
    found = {}
    for case in cases:
        whole = " ".join(word for word in case.split() if not word.startswith("shard."))
        first, _ = _weights(whole, communicator, 0)
        expected, _ = _weights(whole, communicator, STEPS)
        exact, _ = _weights(f"{whole} speed.precision=fp32", communicator, STEPS)
        sharded, describes = _weights(f"{case} shard.stage=3", communicator, STEPS)
        change = _apart(expected, first)
        found[case] = [
            _apart(sharded, expected) / change,
            _apart(exact, expected) / change,
            describes,
        ]
    return found


def _apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(
        float(np.abs(one[name].astype(float) - other[name].astype(float)).max()) for name in other
    )


def _weights(words: str, communicator: Communicator, steps: int) -> tuple[dict[str, Any], str]:
    """Returns the weights after steps of two passes, with an evaluation after each step. The second
    pass of rank 1 has zeros."""
    task: Any = LANGUAGE if "language" in words else IMAGES
    learner: Any = build_learner(
        configure(None, f"optim.name=sgd speed.precision=bf16 {words}".split()), task, communicator
    )
    rank = learner.data.rank
    size = learner.data.size
    draw = np.random.default_rng(rank)
    for step in range(steps):
        micro = []
        for samples, most in ((SHARES[rank], 10), (1, 1 if rank else 10)):
            batch = {
                name: draw.integers(0, most, (samples, *field.shape)).astype(field.dtype)
                for name, field in task.fields.items()
            }
            micro.append(learner.to_device(batch))
        learner.step(micro, Hyper(LR, 0.9, 0.0, sum(SHARES[:size]) + size, step), step)
        learner.evaluate(micro[0])
    return learner.weights(), learner.describe()
