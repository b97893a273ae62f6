"""The torch framework: one rank's model, optimizer and arithmetic in PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config import plugins
from hvdtrain.config.read import Provenance
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, Batch
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper
from hvdtrain.core.seeds import fold
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Gpu, Learner, Task, build_rule, check_fit, fair_threads
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch import allocator
from hvdtrain.frameworks.torch.buffers import Buffers
from hvdtrain.frameworks.torch.compile import check_compiler, compile_words, forwards, keep_gradients
from hvdtrain.frameworks.torch.cuda_stopwatch import stopwatch
from hvdtrain.frameworks.torch.device import check_shared, gpu, pick_device, seed_dropout
from hvdtrain.frameworks.torch.gradients import Meter, NoMeter, add_noise_, clip_
from hvdtrain.frameworks.torch.inputs import Inputs, channels_last
from hvdtrain.frameworks.torch.loss import Loss
from hvdtrain.frameworks.torch.model import black, check_logits, checked_model, normed_model
from hvdtrain.frameworks.torch.nonfinite import any_nonfinite, slope, unless
from hvdtrain.frameworks.torch.optim import rule_optimizer
from hvdtrain.frameworks.torch.optim.rule_optimizer import RuleOptimizer
from hvdtrain.frameworks.torch.parallel import strategy
from hvdtrain.frameworks.torch.parallel.buckets import Buckets
from hvdtrain.frameworks.torch.parallel.local_sgd import LocalSGD
from hvdtrain.frameworks.torch.parallel.select_strategy import select_strategy
from hvdtrain.frameworks.torch.precision import Precision, loss_scale, pick_precision, refuse_tiny_images, take_scale
from hvdtrain.frameworks.torch.profiler import profile


class TorchLearner:
    """A torch model that gives logits (n, classes) for images (n, C, H, W)."""

    def __init__(
        self,
        config: Config,
        model: torch.nn.Module,
        met: tuple[Any, strategy.Strategy],
        meter: Meter | NoMeter,
        inputs: Inputs,
        precision: Precision,
        communicator: Communicator,
    ) -> None:
        self.config, self.model, self.meter, self.inputs, self.precision = config, model, meter, inputs, precision
        self.optimizer, self.strategy = met
        self.local = self.strategy if isinstance(self.strategy, LocalSGD) else None
        self.rank, self.size = communicator.rank, communicator.size
        self.waits_apart = self.strategy.wrapped is None and config.norm.kind != "sync"  # DDP and sync norm wait inside of the passes
        self.forward, self.evaluated = forwards(config, model, self.strategy.wrapped)
        self.loss = Loss(config.model.loss == "squared_error", config.model.label_smoothing)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.dtype, self.device = self.parameters[0].dtype, self.parameters[0].device
        self.scale = loss_scale(precision, self.device)
        self.buffers, self.skips = Buffers(model, self.device), config.guard.nonfinite == "skip"
        self.stopwatch: Stopwatch = stopwatch(self.device)
        if isinstance(self.strategy, Buckets):
            self.strategy.enter = lambda phase: self.stopwatch.enter(phase)  # noqa: PLW0108 (a profile puts another one there)
        rule_optimizer.fill_optimizer_state(self.optimizer)

    def cache_on_device(self, source: Source) -> bool:
        return self.inputs.cache_on_device(source, self.config.data.resident)

    def to_device(self, batch: Batch) -> Batch:
        return self.inputs.to_device(batch)

    def step(self, micro: Sequence[Batch], hyper: Hyper, seed: int) -> Sums:
        enter = self.stopwatch.enter
        seed_dropout(fold(seed, self.rank) & (2**63 - 1), self.device)  # each rank's own
        rule_optimizer.set_hyper(self.optimizer, hyper)
        if not self.model.training:  # of many modules: a third of a millisecond
            self.model.train()
        if self.skips or self.scale.tensors:
            self.buffers.remember()
        self.strategy.begin(len(micro))
        total: Sums = {"loss": 0.0, "right": 0.0, "count": 0}
        divisor = max(1, sum(len(batch["y"]) for batch in micro)) if self.strategy.local_mean else hyper.batch
        for place, batch in enumerate(micro, start=1):
            if place == len(micro):
                self.strategy.last_pass()
                self.meter.last_pass()
            enter("forward")
            loss, sums = self._forward(batch)
            enter("backward")
            (loss / divisor * self.scale.up(slope(loss))).backward()  # a sum over ranks is the mean over the global batch
            total = {name: total[name] + sums[name] for name in total}
            if place < len(micro):
                keep_gradients(self.config, self.parameters)
        enter("communication")
        self.strategy.finish()
        enter("update")
        self.scale.down(self.parameters)
        bad = any_nonfinite(self.parameters)  # of the mean over ranks, before clipping hides it: the same on every rank
        overflowed = self.scale.overflowed(bad)
        total |= {"nonfinite": bad.double() * (not overflowed) / (1 if self.local else self.size)} | unless(
            bad, self.meter.read(hyper, total["count"])
        )
        if overflowed or (self.skips and bad):  # the host waits for the device here
            self.buffers.put_back()
        else:
            clip_(self.parameters, self.config.optim.clip_norm, self.config.optim.clip_value)
            add_noise_(self.parameters, hyper.noise, seed)
            self.strategy.apply(self.optimizer)
        self.optimizer.zero_grad()
        if self.local:
            enter("communication")
            self.local.stepped(self.optimizer)
        enter("")
        return total

    def sync_buffers(self, communicator: Communicator) -> None:
        if self.local:
            self.local.average(self.optimizer)
        self.buffers.sync_buffers(communicator)

    def evaluate(self, batch: Batch) -> Sums:
        self.model.eval()
        with torch.no_grad():
            return self._forward(batch)[1]

    def state(self) -> Arrays:
        return {name: array.copy() for name, array in self.views()}

    def views(self) -> Iterator[tuple[str, np.ndarray]]:
        return ((name, tensor.detach().cpu().numpy()) for name, tensor in self._tensors().items())

    def published(self) -> dict[str, str]:
        own = {id(tensor): name for name, tensor in self._tensors().items()}
        known = self.model.state_dict(keep_vars=True)  # buffers that are not kept are not in it
        return {name: own[id(tensor)] for name, tensor in known.items() if id(tensor) in own}

    def load(self, state: Arrays) -> None:
        state = take_scale(self.scale, state)
        rule_optimizer.check_maker(self.optimizer, state)
        free = "" if isinstance(self.optimizer, RuleOptimizer) else "s."  # the slots of a user's class come with its first step
        own, given = (
            {name: a for name, a in arrays.items() if not free or not name.startswith(free)}
            for arrays in (take_scale(None, self.state()), state)
        )
        check_fit(own, given)
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                if name in own:
                    tensor.copy_(torch.from_numpy(np.asarray(state[name])))
        for name, p in self._trained():
            start = f"s.{name}."
            rule_optimizer.load_optimizer_state(
                self.optimizer, p, {key.removeprefix(start): array for key, array in state.items() if key.startswith(start)}
            )

    def describe(self) -> str:
        count = sum(p.numel() for p in self.model.parameters())
        how = f"torch {self.precision.words} on {self.device}{compile_words(self.config)}"
        return f"{type(self.model).__name__}, {count:,} parameters, {how}, {self.strategy.words}"

    def gpu(self) -> Gpu | None:
        return gpu(self.device)

    def profile(self, path: Path) -> AbstractContextManager[None]:
        return profile(self, path)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Every live tensor that a resume needs."""
        tensors: dict[str, torch.Tensor] = {f"p.{name}": p for name, p in self.model.named_parameters()}
        tensors |= {f"b.{name}": b for name, b in self.model.named_buffers()}
        optimizer_state = {
            f"s.{name}.{key}": t for name, p in self._trained() for key, t in rule_optimizer.optimizer_state(self.optimizer, p).items()
        }
        return tensors | optimizer_state | (rule_optimizer.maker(self.optimizer) if optimizer_state else {}) | self.scale.tensors

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, Sums]:
        """The loss to go backward from, and the sums over the batch."""
        training = self.model.training
        batch = self.inputs.arrived(batch)
        x = self.inputs.images(batch)
        if not len(x) and not training:
            return x.sum(), {"loss": 0.0, "right": 0.0, "count": 0}
        with self.precision.around(self.device):
            logits = self.forward(x) if training else self.evaluated(x)
        if logits.ndim == 0:  # of no samples: nothing to learn, from nothing to count
            return logits, {"loss": 0.0, "right": 0.0, "count": 0}
        each = self.loss.of(logits.to(self.dtype), batch, training)
        right = (logits.detach().argmax(1) == batch["y"]).sum()
        sums = {"loss": each.detach().double().sum(), "right": right.double(), "count": len(logits)}
        return (each * batch["w"] if "w" in batch else each).sum(), sums


def build(config: Config, provenance: Provenance, task: Task, communicator: Communicator) -> Learner:
    """The learner of framework=torch."""
    threads = fair_threads(communicator)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    device = pick_device(config, provenance, communicator)
    check_shared(device, communicator, provenance)
    if device.type == "cpu":
        allocator.keep()
    precision = pick_precision(config, provenance, device, communicator)
    check_compiler(config, provenance, device)
    torch.manual_seed(fold(config.seed) & (2**63 - 1))
    model = normed_model(config, provenance, task, communicator).to(device=device, dtype=precision.weights)
    check_logits(model, config, provenance, task)
    refuse_tiny_images(model, black(2, task, next(model.parameters())), precision, provenance.where("speed.precision"))
    nhwc = channels_last(config.speed.channels_last, plugins.is_dotted(config.model.name), model, device)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = make_optimizer(config, provenance, named)
    meter = (
        Meter([p for _, p in named], communicator.size) if config.log.noise_scale else NoMeter()
    )  # before the reducer: its hooks come first
    met = select_strategy(config, provenance, communicator, optimizer, model)
    return TorchLearner(config, model, met, meter, Inputs(task, device, precision.weights, nhwc), precision, communicator)


def make_optimizer(config: Config, provenance: Provenance, named: strategy.Named) -> torch.optim.Optimizer:
    """The optimizer that optim.name means: one of our rules, or a class of torch.optim."""
    name, where = config.optim.name, provenance.where("optim.name")
    if plugins.is_dotted(name):
        return rule_optimizer.make_user_optimizer(plugins.load_dotted(name, where), name, named, config, provenance)
    return rule_optimizer.make_optimizer(build_rule(config, provenance), named, config.optim.exclude == "norms_and_biases")


def check_optimizer(config: Config, provenance: Provenance) -> None:
    """A UserError where build() would refuse the optimizer that optim.name means, whatever the model."""
    make_optimizer(config, provenance, [("weight", torch.nn.Parameter(torch.zeros(2, 2)))])


def figures() -> Any:
    """What `bench step` asks of this framework: a module that few jobs need."""
    from hvdtrain.frameworks.torch import flops

    return flops


def shapes(config: Config, provenance: Provenance, task: Task) -> dict[str, tuple[int, ...]]:
    """The trained parameters by name, as build() makes them: without memory or work, unless the model reads its own numbers."""
    try:
        with torch.device("meta"):
            model = checked_model(config, provenance, task)
    except UserError:
        raise
    except Exception:  # a meta tensor has no numbers to read; whatever else went wrong does so again
        model = checked_model(config, provenance, task)
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
