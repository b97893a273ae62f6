"""TorchLearner: one rank's torch model, and what a step does to it, in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.mesh import Mesh, make_mesh
from hvdtrain.comm.same_order import SameOrder, doing_in, end_step
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, ArrayStream, Batch
from hvdtrain.core.metrics import Sums, add_sums, zero_sums
from hvdtrain.core.pieces import Piece
from hvdtrain.core.progress import Hyper, Progress
from hvdtrain.core.seeds import fold
from hvdtrain.core.updates import GoOn, Update
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.frameworks.global_weight import global_weight
from hvdtrain.frameworks.learner import Gpu, Learner, Predictions, TimedPass, UnderWay, Waited
from hvdtrain.frameworks.state import gather
from hvdtrain.frameworks.stopwatch import ReplaceableStopwatch
from hvdtrain.frameworks.torch.buffers import Buffers
from hvdtrain.frameworks.torch.compile import compile_summary, keep_gradients
from hvdtrain.frameworks.torch.dense_updates import DenseUpdates
from hvdtrain.frameworks.torch.device import describe_device, gpu, no_such_kernel, seed_dropout
from hvdtrain.frameworks.torch.forward import ONE_VALUE, Forward, first_of
from hvdtrain.frameworks.torch.gradients import Meter, NoMeter, add_noise_, clip_
from hvdtrain.frameworks.torch.inputs import DeviceBatch, split_batch
from hvdtrain.frameworks.torch.model import first_samples_of
from hvdtrain.frameworks.torch.nonfinite import any_nonfinite, one_or_nan, zero_where
from hvdtrain.frameworks.torch.norm.copied_buffers import copied_buffers
from hvdtrain.frameworks.torch.optim import rule_optimizer
from hvdtrain.frameworks.torch.optim.user_optimizer import set_mode
from hvdtrain.frameworks.torch.parallel.dense.hybrid import HybridModel
from hvdtrain.frameworks.torch.parallel.parameter_server.losses import go_on_from
from hvdtrain.frameworks.torch.parallel.parameter_server.select_role import server_or_worker
from hvdtrain.frameworks.torch.parallel.parameter_server.server import Server
from hvdtrain.frameworks.torch.parallel.parameter_server.worker import Worker
from hvdtrain.frameworks.torch.parallel.strategy import OnePass, Shard, Strategy
from hvdtrain.frameworks.torch.parallel.tensor.split_logits import whole_logits
from hvdtrain.frameworks.torch.precision import loss_scale
from hvdtrain.frameworks.torch.profiler import profile
from hvdtrain.frameworks.torch.sampling import continue_sequences
from hvdtrain.frameworks.torch.state import LearnerState

if TYPE_CHECKING:  # torch.distributed.pipelining: half a second
    from hvdtrain.frameworks.torch.parallel.pipeline.pipelined import Pipelined


@dataclass(eq=False)
class TorchLearner(Learner):
    """A torch model, its optimizer, and how the ranks' gradients become one."""

    config: Config
    mesh: Mesh
    model: torch.nn.Module
    forward: Forward  # of the model, in training through what the strategy made of it
    optimizer: torch.optim.Optimizer  # as the strategy wrapped it, without state
    strategy: Strategy
    meter: Meter | NoMeter  # of the gradient noise scale
    stopwatch: ReplaceableStopwatch  # the strategy's too
    pipelined: Pipelined | None = None  # of parallel.pipeline: the passes through the stages
    hybrid: HybridModel | None = None  # of parallel.dense
    orders: Sequence[SameOrder] = ()  # in which ranks come to layers

    def __post_init__(self) -> None:
        self.data, self.readers = self.mesh.data, self.mesh.readers
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._take_shards()
        self.is_sharded = not all(shard.is_whole for shard in self.shards)
        self.dtype, self.device = self.parameters[0].dtype, self.forward.inputs.device
        self.scale = loss_scale(self.forward.precision, self.device)
        self.buffers = Buffers(self.model, self.device)
        self.dense_updates = None
        if self.hybrid and self.config.parallel.dense_updates > 1:
            self.dense_updates = DenseUpdates(self.config, self.hybrid, self.forward, self.strategy, self.scale, self.stopwatch)
        if self.dense_updates:
            self._end_with(self.dense_updates.others(self.shards))
        self.skips_nonfinite = self.config.guard.nonfinite == "skip"
        self.waits_only_in_communication = not self.strategy.waits_in_passes and self.config.norm.kind != "sync"
        self._hold_state()

    def _take_shards(self) -> None:
        self.shards = [self.strategy.shard(p) for p in self.parameters]
        self.updated = [shard.parameter for shard in self.shards]
        self._end_with(self.shards)

    def _end_with(self, shards: list[Shard]) -> None:
        """These are updated at the end of a step."""
        self.last_shards = shards
        self.last_updated = [shard.parameter for shard in shards]

    def _hold_state(self) -> None:
        self._state = LearnerState(self.model, self.optimizer, self.scale, self.strategy, self.mesh.replicas.rank == 0)
        rule_optimizer.fill_optimizer_state(self.optimizer)
        set_mode(self.optimizer, training=False)

    def divide_anew(self) -> None:
        if isinstance(self.strategy, Server | Worker):
            self._take_another_role(self.strategy)
        else:
            self.optimizer = self.strategy.divide_anew()
        self._take_shards()
        self._hold_state()

    def _take_another_role(self, former: Server | Worker) -> None:
        """That of a server or worker by the ranks that are left, whose numbers and groups are others."""
        former.cut_off()
        self.mesh = make_mesh(self.mesh.world, self.config)
        self.readers = self.mesh.readers
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.strategy = server_or_worker(self.config, self.mesh, named, self.stopwatch)
        self.optimizer = self.strategy.wrap(self.model, former.of_wholes).optimizer

    def how_to_go_on(self, former_rank: int, kept: int) -> GoOn | None:
        strategy, world = self.strategy, self.mesh.world
        if not isinstance(strategy, Server | Worker) or self.config.guard.lost != "shrink":
            return None
        strategy.cut_off()
        how = go_on_from(world.allgather_object(strategy.report(former_rank, kept)), self.config.servers.count)
        if how:
            self.mesh = make_mesh(world, self.config)
            self.readers = self.mesh.readers
        return how

    def go_on(self, how: GoOn, kept: int) -> None:
        assert isinstance(self.strategy, Server | Worker), type(self.strategy)
        self.strategy.go_on(how, kept, self.mesh.role)

    def own_steps(self, steps: Sequence[Progress]) -> Iterable[Progress]:
        return self.strategy.own_steps(steps)

    def read_updates(self) -> list[Update]:
        return self.strategy.read_updates()

    def cache_on_device(self, source: Source) -> bool:
        return self.forward.inputs.cache_on_device(source, self.config.data.resident)

    def to_device(self, batch: Batch) -> DeviceBatch:
        return self.forward.inputs.to_device(batch)

    def step(self, micro: Sequence[DeviceBatch], hyper: Hyper, seed: int) -> Sums:
        if self.readers:  # a parameter server drops nothing
            seed_dropout(fold(seed, self._dropout_stream()) & (2**63 - 1), self.device)
        rule_optimizer.set_hyper(self.optimizer, hyper)
        if not self.model.training:  # train() visits every module: a third of a millisecond
            self.model.train()
        set_mode(self.optimizer, training=True)
        if self.skips_nonfinite or self.scale.tensors:
            self.buffers.save()

        self.strategy.begin_step(hyper)
        divisor = self._divisor(micro, hyper.batch)
        with no_such_kernel(self.config):
            sums = self.strategy.run(micro, divisor, self._passes(hyper)) or zero_sums(self.forward.task.sums)

        self.stopwatch.enter("communication")
        end_step(self.orders)
        self.strategy.reduce()

        self.stopwatch.enter("update")
        sums = self._counted(sums) | self._update(hyper, seed, sums["count"])
        self.stopwatch.enter("")
        return sums

    def _dropout_stream(self) -> int:
        """A number for dropout, of samples, stage and positions: ranks of a tensor group that have all positions drop the same."""
        part = self.mesh.tensor.rank if self.config.parallel.sequence else 0
        readers = self.readers or self.data
        return readers.rank + readers.size * (self.mesh.pipe.rank + self.mesh.pipe.size * part)

    def _counted(self, sums: Sums) -> Sums:
        """What this rank reports of the sums over its samples, so that those that read the same ones count them once."""
        return sums if self.mesh.counts else {name: 0 * value for name, value in sums.items()}

    def _divisor(self, micro: Sequence[DeviceBatch], batch: int) -> int:
        """What the losses are divided by before backward, so that the sum of gradients over ranks is the mean over the global batch."""
        own = sum(each.weight for each in micro)
        if self.strategy.local_mean or self.readers is None:
            return max(1, own)
        return global_weight(self.forward.task, own, batch, self.readers)

    def _passes(self, hyper: Hyper) -> OnePass:
        if updates := self.dense_updates:
            return lambda batch, divisor, is_last: updates.passes(batch, hyper, self.optimizer)
        return self._all_passes if self.pipelined else self._one_pass

    def _one_pass(self, batch: DeviceBatch, divisor: int, is_last: bool) -> Sums:
        """Forward and backward of one micro-batch: adds to p.grad the gradient of (sum of its losses) / divisor."""
        if is_last:
            self.meter.last_pass()
        self.stopwatch.enter("forward")
        losses = self.forward.train(batch)
        self.stopwatch.enter("backward")
        (losses.total / divisor * self.scale.scale(one_or_nan(losses.total))).backward()
        if not is_last:
            keep_gradients(self.config.speed.compile, self.parameters)
        return losses.sums

    def _all_passes(self, micro: Sequence[DeviceBatch], divisor: int, is_last: bool) -> Sums:
        """Passes of all micro-batches of a step through the stages of this rank; the last stage's has the sums."""
        assert self.pipelined is not None
        sums = zero_sums(self.forward.task.sums)

        def loss(batch: DeviceBatch, outputs: Any) -> torch.Tensor:
            nonlocal sums
            losses = self.forward.losses(outputs, batch, training=True)
            sums = add_sums(sums, losses.sums)
            return losses.total / divisor * self.scale.scale(one_or_nan(losses.total))

        self.pipelined.train(micro, self.forward.inputs_of, loss, self.stopwatch.enter)
        return sums

    def _update(self, hyper: Hyper, seed: int, count: int) -> Sums:
        """The optimizer's step from the mean gradient, unless it is to be left out; `count` is the rank's samples.

        Returns "nonfinite" and the keys of the noise scale.
        """
        self.scale.unscale_(self.last_updated)
        own_bad = any_nonfinite(self.last_updated)  # before clipping hides it
        own_bad = own_bad | self.dense_updates.bad if self.dense_updates else own_bad
        bad = self.strategy.total(own_bad.double()) > 0
        overflowed = self.scale.update(bad)
        # ranks with the same gradient each report a share, so that the sum over ranks counts the step once
        sums: Sums = {"nonfinite": bad.double() * (not overflowed) / self.strategy.equal_ranks}
        sums |= zero_where(bad, self.meter.read(hyper, count, self.shards, self.strategy.total))
        if overflowed or (self.skips_nonfinite and bad):  # the host waits for the device here
            self.buffers.restore()
        else:
            clip_(self.last_shards, self.config.optim.clip_norm, self.config.optim.clip_value, self.strategy.total)
            add_noise_(self.last_shards, hyper.noise, seed)
            self.strategy.optimizer_step(self.optimizer)
        self.optimizer.zero_grad()
        return sums

    @property
    def first_samples(self) -> int:
        return first_samples_of(self.model)

    def begin_with(self, batch: DeviceBatch) -> None:
        model: Any = self.model
        model.begin_with(self.forward.inputs_of(batch))
        self.strategy.weights_changed()

    def trains_one_sample(self) -> bool:
        if self.pipelined or self.hybrid or not any(isinstance(module, _BatchNorm) for module in self.model.modules()):
            return True
        x = self.forward.inputs_of(self.forward.inputs.zeros(1))
        try:
            autocast = self.forward.precision.autocast(self.device)
            with torch.random.fork_rng(devices=[]), torch.no_grad(), copied_buffers(self.model), autocast:
                self.model.train()(x)
        except ValueError as error:
            return ONE_VALUE not in f"{error}"
        return True

    def sync_buffers(self, communicator: Communicator) -> None:
        self.strategy.sync(self.optimizer)
        set_mode(self.optimizer, training=False)  # at each sync point, so that a resumed job rounds where an uninterrupted one does
        self.buffers.sync_buffers(communicator, self.mesh.servers)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        if self.config.optim.ema is None:
            yield
            return

        def average_of(p: torch.nn.Parameter) -> torch.Tensor:
            return rule_optimizer.average(self.optimizer, p)

        found = self.strategy.put_together(average_of, self.parameters)
        weights = {p: p.data for p in found}
        try:
            for p, average in found.items():
                p.data = average
            yield
        finally:
            for p, own in weights.items():
                p.data = own

    def evaluate(self, batch: DeviceBatch) -> Sums:
        self.model.eval()
        with torch.no_grad():
            return self._counted(self._evaluate_stages(batch) if self.pipelined else self.forward.evaluate(batch).sums)

    def _evaluate_stages(self, batch: DeviceBatch) -> Sums:
        """The last stage's has the sums."""
        assert self.pipelined is not None
        sums = zero_sums(self.forward.task.sums)

        def add(part: DeviceBatch, outputs: Any) -> None:
            nonlocal sums
            sums = add_sums(sums, self.forward.losses(outputs, part, training=False).sums)

        self.pipelined.evaluate(split_batch(batch, 2 * self.mesh.pipe.size), self.forward.inputs_of, add)
        return sums

    def predict(self, batch: DeviceBatch) -> Predictions:
        if self.pipelined:
            what = "the outputs of a pipeline are on its last rank alone, and its samples too"
            raise UserError(what, self.config.where("parallel.pipeline"), "predict with parallel.pipeline=1, as evaluate does")
        self.model.eval()
        with torch.no_grad():
            outputs, sums = self.forward.evaluate(batch)
        return Predictions(first_of(whole_logits(outputs)).cpu().numpy(), self._counted(sums))

    def continue_sequences(
        self,
        prompts: np.ndarray,
        length: int,
        *,
        tokens: int,
        temperature: float,
        seed: int,
        first: int,
        before_each: Callable[[], None],
    ) -> np.ndarray:
        if not hasattr(self.model, "empty_cache"):
            what = f"{type(self.model).__name__} has no empty_cache(), by which it would be read token by token"
            raise UserError(what, self.config.where("model.name"), "a run with model.name=gpt")
        self.model.eval()
        model: Any = self.model
        keeps_up = self.config.shard.stage == 3 and not len(prompts)  # weights are gathered by all ranks
        given = torch.from_numpy(np.zeros((1, prompts.shape[1]), np.int64) if keeps_up else prompts).to(self.device)
        with self.forward.precision.autocast(self.device):
            found = continue_sequences(
                model, given, length, tokens=tokens, temperature=temperature, seed=seed, first=first, before_each=before_each
            )
        return found[: len(prompts)].cpu().numpy()

    def state(self) -> Arrays:
        return gather(self.mesh.parts, self.pieces())

    def weights(self) -> Arrays:
        """Copies of weights and buffers by the names of the model's state dict, as evaluations have them: averages with optim.ema.

        A collective where ranks have parts of them, or of the averages.
        """
        with self.averaged():
            arrays = gather(self.mesh.parts, (piece for piece in self.pieces() if not piece.name.startswith("s.")))
        return {name: arrays[own] for name, own in self.state_dict_names().items()}

    def pieces(self) -> Iterator[Piece]:
        return self._state.pieces()

    def state_dict_names(self) -> dict[str, str]:
        return self._state.state_dict_names()

    def load(self, state: Arrays | ArrayStream) -> None:
        set_mode(self.optimizer, training=False)  # a state has the weights of a sync point
        self._state.load(state)
        self.optimizer.zero_grad()  # of a step that was cut off

    def describe(self) -> str:
        name = type(self.model).__name__
        if self.config.shard.stage == 3:  # fully_shard() has made a class of the model's own
            name = name.removeprefix("FSDP")
        count = sum(math.prod(self.strategy.part(p).shape) for p in self.model.parameters())
        how = f"torch {self.forward.precision.summary} on {describe_device(self.device)}{compile_summary(self.config.speed.compile)}"
        return f"{name}, {count:,} parameters, {how}, {self.strategy.summary}"

    def read_waited(self) -> Waited | None:
        return self.pipelined.read_waited() if self.pipelined else None

    def last_passes(self) -> list[TimedPass]:
        return self.pipelined.last_passes() if self.pipelined else []

    def under_way(self) -> UnderWay | None:
        found, doing = self.pipelined.under_way() if self.pipelined else None, doing_in(self.orders)
        if found is None and doing:
            return UnderWay(doing, None)
        if found is None or found.waits_for is None:
            return found
        apart = self.mesh.world.size // self.mesh.pipe.size  # of the ranks of a pipeline
        return found._replace(waits_for=self.mesh.world.rank + (found.waits_for - self.mesh.pipe.rank) * apart)

    def gpu(self) -> Gpu | None:
        return gpu(self.device)

    def profile(self, path: Path) -> AbstractContextManager[None]:
        return profile(self.stopwatch, self.device, path)
