"""Models whose layers depend on the samples of a rank or on chance, on the ranks: what some steps
and an evaluation give, or the error."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Batch
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.extras.fully_sharded.torch.gathered_types import group_of
from hvdtrain.extras.fully_sharded.torch.strategy import _AllGather, _ReduceScatter
from hvdtrain.frameworks.torch.pipeline_unit import Unit
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

TASK = Classification((4, 4, 1), 3, np.array([0.0]), np.array([1.0]))
SHARES = (5, 3)
STEPS = 4
LR = 0.5
WIDTH = 6


class Blocks(nn.Module):
    """Three blocks of one shape; choose() selects the blocks that a forward pass calls."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(math.prod(shape), WIDTH)
        self.outputs = nn.Linear(WIDTH, classes)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(3)
        )

    def choose(self, x: torch.Tensor) -> list[int]:
        return [0, 1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        h = torch.tanh(self.inputs(x))
        for i in self.choose(x):
            h = h + self.call(i, h)
        return self.outputs(h)

    def call(self, i: int, h: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.blocks[i](h)
        return found

    def tensor_plan(self) -> dict[str, str]:
        return {"blocks.*.0": "columns", "blocks.*.2": "rows"}


class Experts(Blocks):
    """One of two blocks for each sample; a pass calls only the blocks that its samples need."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        h = torch.tanh(self.inputs(x))
        first = x[:, :1] > 0.5
        for i, mine in enumerate((first, ~first)):
            if bool(mine.any()):
                h = h + mine * self.call(i, h)
        return self.outputs(h)


class InsideExperts(Experts):
    """Without `blocks`: all parameters are one unit."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(shape, classes)
        self.layers = self.blocks
        del self.blocks

    def call(self, i: int, h: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers[i](h)
        return found

    def tensor_plan(self) -> dict[str, str]:
        return {"layers.*.0": "columns", "layers.*.2": "rows"}

    def pipeline_units(self) -> list[Unit]:
        return [
            Unit("inputs", (self.inputs,), lambda x: torch.tanh(self.inputs(x.flatten(1)))),
            Unit("experts", (self.layers,), self._experts),
            Unit("outputs", (self.outputs,), self.outputs),
        ]

    def _experts(self, h: torch.Tensor) -> torch.Tensor:
        first = h[:, :1] > 0
        for i, mine in enumerate((first, ~first)):
            if bool(mine.any()):
                h = h + mine * self.call(i, h)
        return h


class HiddenExperts(InsideExperts):
    """The model with hidden experts as its pipeline stages compute it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.outputs(self._experts(torch.tanh(self.inputs(x.flatten(1)))))
        return found


class ConvExperts(nn.Module):
    """Experts in front of a dense part that is cut over ranks."""

    dense_part = "dense"

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(math.prod(shape), WIDTH) for _ in range(2))
        self.dense = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        h = x.new_zeros(len(x), WIDTH)
        first = x[:, :1] > 0.5
        for i, mine in enumerate((first, ~first)):
            if bool(mine.any()):
                h = h + mine * self.experts[i](x)
        found: torch.Tensor = self.dense(h)
        return found


class OftenDense(ConvExperts):
    """Calls its dense part as often as `times` says."""

    def __init__(self, shape: tuple[int, ...], classes: int, times: int = 2) -> None:
        super().__init__(shape, classes)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.experts[0](x.flatten(1))
        for _ in range(self.times):
            found = self.dense(
                found
                if found.shape[1] == WIDTH
                else functional.pad(found, (0, WIDTH - found.shape[1]))
            )
        return found[:, : TASK.classes]


class NormExperts(Experts):
    """Each with a batch norm."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(shape, classes)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in self.blocks)

    def call(self, i: int, h: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norms[i](super().call(i, h))
        return found


class Depth(Blocks):
    """Ranks call the first block, or all."""

    def choose(self, x: torch.Tensor) -> list[int]:
        return [0, 1, 2] if bool(x[0, 0] > 0.5) else [0]


class Alike(Blocks):
    """LayerDrop (Fan et al. 2019, arXiv:1909.11556) with the same choice on all ranks: of 4 steps
    each leaves out others."""

    step = 0

    def choose(self, x: torch.Tensor) -> list[int]:
        return [i for i in range(3) if not self.training or (self.step + i) % 3]


class Drop(Blocks):
    """LayerDrop by torch's generator, which gives ranks with other samples other numbers."""

    def choose(self, x: torch.Tensor) -> list[int]:
        return [i for i in range(3) if not self.training or float(torch.rand(())) > 0.5]


class OwnDrop(Blocks):
    """LayerDrop by Python's generator, of each rank another one."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(shape, classes)
        self.generator = random.Random()

    def choose(self, x: torch.Tensor) -> list[int]:
        return [i for i in range(3) if not self.training or self.generator.random() > 0.5]


class Unreached(Blocks):
    """Calls all blocks; what one of them gives does not reach the loss of a rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        h = torch.tanh(self.inputs(x))
        parts = [block(h) for block in self.blocks]
        used = parts[:2] if bool(x[0, 0] > 0.5) else parts[1:]
        found: torch.Tensor = self.outputs(h + sum(used))
        return found


class Again(Blocks):
    """Each block is computed again for backward, by torch's checkpoint() around the call of it."""

    def call(self, i: int, h: torch.Tensor) -> torch.Tensor:
        found: Any = checkpoint(self.blocks[i], h, use_reentrant=False)
        return found  # type: ignore[no-any-return]


class EvaluatedExperts(Blocks):
    """Other blocks in evaluation alone."""

    def choose(self, x: torch.Tensor) -> list[int]:
        return [0, 1, 2] if self.training else [int(x[0, 0] > 0.5)]


class StagedExperts(Blocks):
    """In evaluation one block, which each rank may have been told another one of."""

    evaluated = 0

    def choose(self, x: torch.Tensor) -> list[int]:
        return [0, 1, 2] if self.training else [self.evaluated]

    def pipeline_units(self) -> list[Unit]:
        return [
            Unit("inputs", (self.inputs,), lambda x: torch.tanh(self.inputs(x.flatten(1)))),
            Unit("blocks", (self.blocks,), self._blocks),
            Unit("outputs", (self.outputs,), self.outputs),
        ]

    def _blocks(self, h: torch.Tensor) -> torch.Tensor:
        for i in self.choose(h):
            h = h + self.call(i, h)
        return h


def batch(rank: int, step: int, how: str) -> Batch:
    """Returns a batch. A sample's first pixel chooses its expert: the rank's, or with `alike` the
    two experts alternately."""
    rng = np.random.default_rng(10 * rank + step)
    x = rng.integers(0, 256, (SHARES[rank], *TASK.shape), dtype=np.uint8)
    x[:, 0, 0, 0] = np.arange(SHARES[rank]) % 2 * 255 if how == "alike" else 255 * (1 - rank % 2)
    return {"x": x, "y": rng.integers(0, TASK.classes, SHARES[rank])}


def all_samples(batches: list[Batch]) -> Batch:
    return {name: np.concatenate([each[name] for each in batches]) for name in batches[0]}


def by_hand(model: nn.Module, how: str, readers: int) -> dict[str, np.ndarray]:
    """Returns the weights after the steps in plain torch: one pass for each rank's samples, which
    add up to the mean over all samples."""
    model = model.double().train()
    for step in range(STEPS):
        model.step = step  # type: ignore[assignment]
        batches = [batch(rank, step, how) for rank in range(len(SHARES))]
        for each in batches if readers > 1 else [all_samples(batches)]:
            x = torch.from_numpy(each["x"]).double().permute(0, 3, 1, 2) / 255
            loss = functional.cross_entropy(
                model(x), torch.from_numpy(each["y"]), reduction="sum"
            ) / sum(SHARES)
            loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(LR * p.grad)
                p.grad = None
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def outcome(
    communicator: Communicator, model: str, words: str, how: str, change: Callable[[Any], None]
) -> str | float:
    """Returns the error's text, or the difference between the weights after the steps and plain
    torch's."""
    make = globals()[model]
    config = configure(
        None,
        [
            *f"model.name=layers_on_ranks:{model} speed.precision=fp64 optim.name=sgd "
            "optim.momentum=0".split(),
            *f"comm.bucket_mb=0.001 batch.size={sum(SHARES)} {words}".split(),
        ],
    )
    try:
        learner: Any = build_learner(config, TASK, communicator)
    except UserError as error:
        return str(error)
    change(learner)
    first = {
        name.removeprefix("p."): torch.from_numpy(array)
        for name, array in learner.state().items()
        if name.startswith("p.")
    }
    reader = learner.data
    try:
        for step in range(STEPS):
            learner.model.step = step
            batches = [batch(rank, step, how) for rank in range(len(SHARES))]
            own = batches[reader.rank] if reader.size > 1 else all_samples(batches)
            learner.step(
                [learner.to_device(own)], Hyper(LR, 0.0, 0.0, sum(SHARES), step=step), step
            )
            learner.evaluate(learner.to_device(own))
    except UserError as error:
        return str(error)
    plain = make(TASK.shape, TASK.classes)
    plain.load_state_dict({name: first[name] for name in plain.state_dict()})
    expected = by_hand(plain, how, reader.size)
    state = learner.state()
    return max(float(np.abs(state[f"p.{name}"] - array).max()) for name, array in expected.items())


def seeded(learner: Any) -> None:
    """Seeds each rank differently."""
    if hasattr(learner.model, "generator"):
        learner.model.generator.seed(learner.mesh.world.rank)


def not_waiting(learner: Any) -> None:
    """As if the host waited for no collective."""
    for order in learner.orders:
        order.lags = True


class _Gathering(_AllGather):
    """A collective that is still under way when the step ends."""

    def __call__(self, *tensors: Any, **options: Any) -> None:
        self._unit.gathers()


class _Reducing(_ReduceScatter):
    def __call__(self, *tensors: Any, **options: Any) -> None:
        self._unit.reduces()


def lagging(learner: Any) -> None:
    """Behaves like NCCL: the host reaches the end of the step although ranks make different
    collectives, which no engine here allows. The numbers are arbitrary."""
    not_waiting(learner)
    for module in learner.model.modules():
        if isinstance(module, FSDPModule) and (group := group_of(module)):
            group._all_gather_comm.__class__ = _Gathering
            group._reduce_scatter_comm.__class__ = _Reducing


CHANGES = {"lagging": lagging, "not waiting": not_waiting}


def outcomes(
    communicator: Communicator, cases: list[tuple[str, str, str]]
) -> dict[str, list[str | float]]:
    """Returns each rank's outcome by model and words. The third item of a case is `alike`, as in
    batch(), or a change of the learner."""
    found = {}
    for model, words, how in cases:
        own = outcome(communicator, model, words, how, CHANGES.get(how, seeded))
        found[" ".join([model, words, how]).strip()] = communicator.allgather_object(own)
    return found


def under_way(communicator: Communicator) -> list[list[str]]:
    """What the report of a stall would say of each rank, in the middle block of forward and
    backward, and after the step."""
    words = "model.name=layers_on_ranks:Blocks speed.precision=fp64 shard.stage=3 batch.size=8"
    learner: Any = build_learner(configure(None, words.split()), TASK, communicator)
    found: list[str] = []

    def note(*_: Any) -> None:
        doing = learner.under_way()
        found.append(doing.text if doing else "")

    middle = learner.model.blocks[1][1]
    middle.register_forward_hook(note)
    middle.register_full_backward_hook(note)
    learner.step(
        [learner.to_device(batch(communicator.rank, 0, "alike"))],
        Hyper(LR, 0.0, 0.0, sum(SHARES)),
        0,
    )
    note()
    return communicator.allgather_object(found)


def phases(communicator: Communicator) -> list[list[str]]:
    """Returns for each rank the phases of a step with stage 3 and of the evaluation after it, in
    order."""
    words = "model.name=layers_on_ranks:Blocks speed.precision=fp64 shard.stage=3 batch.size=8"
    learner: Any = build_learner(configure(None, words.split()), TASK, communicator)
    own = learner.to_device(batch(communicator.rank, 0, "alike"))
    with learner.stopwatch.replaced_by(stamps := Stamps()):
        learner.stopwatch.enter("data")
        learner.step([own], Hyper(LR, 0.0, 0.0, sum(SHARES)), 0)
        learner.evaluate(own)
    return communicator.allgather_object(stamps.entered)


class Stamps:
    """A stopwatch that keeps the phases in the place of times."""

    def __init__(self) -> None:
        self.entered: list[str] = []

    def enter(self, phase: str) -> None:
        self.entered.append(phase)

    def read(self) -> list[dict[str, float]]:
        return []
