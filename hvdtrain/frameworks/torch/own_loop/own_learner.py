"""OwnLearner: a script's model and optimizer as what checkpoints, replicas and health need of a Learner; the script has the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, ArrayStream, Batch
from hvdtrain.core.metrics import Sums
from hvdtrain.core.pieces import Piece
from hvdtrain.core.seeds import fold
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.frameworks.state import gather
from hvdtrain.frameworks.stopwatch import HostStopwatch, ReplaceableStopwatch
from hvdtrain.frameworks.torch.buffers import Buffers
from hvdtrain.frameworks.torch.build import device_of_rank
from hvdtrain.frameworks.torch.device import seed_dropout
from hvdtrain.frameworks.torch.gradients import clip_
from hvdtrain.frameworks.torch.nonfinite import any_nonfinite, one_or_nan
from hvdtrain.frameworks.torch.optim.user_optimizer import check_elementwise
from hvdtrain.frameworks.torch.own_loop.given_optimizer import WHERE, take_optimizer
from hvdtrain.frameworks.torch.own_loop.prepared_optimizer import PreparedOptimizer
from hvdtrain.frameworks.torch.parallel.select_strategy import select_strategy
from hvdtrain.frameworks.torch.precision import NoScale
from hvdtrain.frameworks.torch.state import LearnerState


@dataclass(frozen=True)
class Samples:
    """This rank's samples of one batch: batch["x"] is a tensor (n, ...) on the device, in the number type of the data."""

    fields: Mapping[str, torch.Tensor]
    count: int  # of this rank's samples that count: 0 on a rank that has none, and gets one that does not
    step: int = 0  # steps done before this one
    epoch: int = 0  # that its first sample is of, from 0
    ends_epoch: bool = False  # with its last sample an epoch is over

    def __getitem__(self, name: str) -> torch.Tensor:
        """Raises UserError for a field that the data do not have."""
        if name not in self.fields:
            raise UserError(f"the samples have no {name!r}", "ctx.samples()", f"their fields: {', '.join(self.fields)}")
        return self.fields[name]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """x, y = batch"""
        return iter(self.fields.values())


class OwnLearner:
    """Every rank makes one. on_step: called after each step of the optimizer.

    Raises UserError where the model, the optimizer or the engine cannot do what the configuration asks for.
    """

    def __init__(
        self, config: Config, mesh: Mesh, model: torch.nn.Module, optimizer: torch.optim.Optimizer, on_step: Callable[[], None]
    ) -> None:
        self.config, self.mesh, self.data, self._on_step = config, mesh, mesh.data, on_step
        self.device = device_of_rank(config, mesh.world)
        take_optimizer(model, optimizer)
        on = {p.device.type for p in model.parameters()}
        if on != {self.device.type}:
            what = f"the model is on {', '.join(sorted(on))}, this rank computes on {self.device}"
            raise UserError(what, WHERE, "model.to(ctx.device) before the optimizer is made")
        if config.shard.stage:
            check_elementwise(optimizer, type(optimizer).__name__, config.where("shard.stage"))
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.strategy = select_strategy(config, mesh, self._named, optimizer, ReplaceableStopwatch(HostStopwatch()))
        wrapped = self.strategy.wrap(model, optimizer)
        self.model, self.forward, self._inner = model, wrapped.forward, wrapped.optimizer
        self.optimizer = PreparedOptimizer(self._inner, self._update)
        self.shards = [self.strategy.shard(p) for _, p in self._named]
        self._updated = [shard.parameter for shard in self.shards]
        self.is_sharded = not all(shard.is_whole for shard in self.shards)
        self.dtype = self._named[0][1].dtype
        self.buffers = Buffers(model, self.device)
        self._state = LearnerState(model, self._inner, NoScale(), self.strategy, mesh.replicas.rank == 0)
        self._bad: torch.Tensor = torch.zeros((), dtype=torch.float64, device=self.device)  # steps with numbers that are not finite
        self._batch: Samples | None = None  # whose step has not been made yet
        self._global_batch = 0
        self._passed = False  # ctx.backward() was called for it

    def cache_on_device(self, source: Source) -> bool:
        """Never: the script may look at any sample."""
        return False

    def to_device(self, batch: Batch) -> Samples:
        """numpy (n, ...) of each field as tensors of the same number type on the device."""
        fields = {name: torch.from_numpy(np.require(array, requirements=["C", "W"])).to(self.device) for name, array in batch.items()}
        return Samples(fields, len(next(iter(batch.values()))))

    def begin_step(self, batch: Samples, global_batch: int) -> None:
        """The script gets this batch. Layers that draw random numbers draw those of the seed and the step."""
        assert self._batch is None, f"step {batch.step} begins before the one before it was made"
        self._batch, self._global_batch, self._passed = batch, global_batch, False
        seed_dropout(fold(fold(self.config.seed, batch.step), self.data.rank) & (2**63 - 1), self.device)
        if self.config.guard.nonfinite == "skip":
            self.buffers.save()

    def backward(self, loss: Any) -> None:
        """As Context.backward()."""
        where, once = "ctx.backward()", "loss = loss_of(model(batch['x']), batch['y']); ctx.backward(loss); optimizer.step()"
        if self._batch is None:
            raise UserError("no batch of ctx.samples() is under way", where, f"for batch in ctx.samples(...): {once}")
        if self._passed:
            what = "a second backward pass for one batch: its gradients are on their way already"
            raise UserError(what, where, "add up the losses and call it once; or a smaller batch= in ctx.samples()")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            found += " without a gradient" if isinstance(loss, torch.Tensor) and loss.numel() == 1 else ""
            raise UserError(f"the loss is {found}", where, "one number that depends on the model: the mean over this rank's samples")
        self._passed = True
        share = self._batch.count / self._global_batch  # the sum of gradients over ranks is then the mean over the global batch
        if self.strategy.local_mean:
            share = float(self._batch.count > 0)

        def one_pass(batch: Any, divisor: int, is_last: bool) -> Sums:
            (loss * share * one_or_nan(loss)).sum().backward()
            return {}

        self.strategy.run([self._batch.fields], 1, one_pass)

    def _update(self) -> None:
        """The optimizer's step from the mean gradient over the global batch. A collective."""
        if self._batch is None or not self._passed:
            what = "optimizer.step() without ctx.backward(loss)" if self._batch else "optimizer.step() without a new batch"
            fix = "ctx.backward(loss) in the place of loss.backward(): it weights this rank's samples, and starts what ranks exchange"
            raise UserError(what, "optimizer.step()", fix if self._batch else "one step for each batch of ctx.samples()")
        self.strategy.reduce()
        bad = self.strategy.total(any_nonfinite(self._updated).double()) > 0
        self._bad = self._bad + bad.double() / self.strategy.equal_ranks
        if self.config.guard.nonfinite == "skip" and bad:  # the host waits for the device here
            self.buffers.restore()
        else:
            clip_(self.shards, self.config.optim.clip_norm, self.config.optim.clip_value, self.strategy.total)
            self.strategy.optimizer_step(self._inner)
        self.zero_grad()
        self._batch = None
        self._on_step()

    @property
    def has_stepped(self) -> bool:
        """Whether the step of the last batch was made."""
        return self._batch is None

    def zero_grad(self) -> None:
        for _, p in self._named:
            p.grad = None
        self._inner.zero_grad()

    def read_nonfinite(self) -> float:
        """This rank's share of the steps that had numbers which are not finite, since the last call."""
        found, self._bad = float(self._bad), torch.zeros_like(self._bad)
        return found

    @property
    def lr(self) -> float:
        """Of the first parameter group now; 0 where it has none."""
        return float(self._inner.param_groups[0].get("lr", 0.0))

    def sync_buffers(self, communicator: Communicator) -> None:
        self.strategy.sync(self._inner)
        self.buffers.sync_buffers(communicator)

    def state(self) -> Arrays:
        return gather(self.mesh.parts, self.pieces())

    def pieces(self) -> Iterator[Piece]:
        return self._state.pieces()

    def state_dict_names(self) -> dict[str, str]:
        return self._state.state_dict_names()

    def load(self, state: Arrays | ArrayStream) -> None:
        """As Learner.load()."""
        self._state.load(state)
        self._batch = None

    def describe(self) -> str:
        count = sum(p.numel() for _, p in self._named)
        precision = str(self.dtype).removeprefix("torch.")
        return f"{type(self.model).__name__}, {count:,} parameters, {precision} on {self.device}, {self.strategy.summary}"
