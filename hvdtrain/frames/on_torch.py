"""The torch frame: one rank's model, optimizer and arithmetic in PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain import leaf
from hvdtrain.comm.engine import Engine, Single
from hvdtrain.config import Config
from hvdtrain.configure import Origins
from hvdtrain.errors import UserError
from hvdtrain.frames import torch_optimizer, torch_reduce
from hvdtrain.frames.learner import Learner, Task, build_rule, check_fit, fair_threads
from hvdtrain.frames.torch_buffers import Buffers
from hvdtrain.frames.torch_device import check_shared, pick_device
from hvdtrain.frames.torch_finite import any_nonfinite, slope, unless
from hvdtrain.frames.torch_gradient import Meter, NoMeter, add_noise_, clip_
from hvdtrain.frames.torch_loss import Loss
from hvdtrain.frames.torch_model import check_logits, normed_model
from hvdtrain.frames.torch_optimizer import RuleOptimizer
from hvdtrain.state import Arrays, Batch, Hyper, Sums, fold


class TorchLearner:
    """A torch model that gives logits (n, classes) for images (n, C, H, W)."""

    def __init__(
        self,
        config: Config,
        model: torch.nn.Module,
        optimizer: Any,
        reducer: torch_reduce.Reducer,
        meter: Meter | NoMeter,
        task: Task,
        engine: Engine,
    ) -> None:
        self.config, self.model, self.optimizer, self.reducer, self.meter = config, model, optimizer, reducer, meter
        self.rank, self.size = engine.rank, engine.size
        self.forward = torch_reduce.Forward(model, config.norm.kind == "sync") if reducer.wrapped is None else reducer.wrapped
        self.loss = Loss(config.model.loss == "squared_error", config.model.label_smoothing)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.dtype, self.device = self.parameters[0].dtype, self.parameters[0].device
        self._mean = torch.tensor(task.mean, dtype=self.dtype, device=self.device).view(1, -1, 1, 1)
        self._std = torch.tensor(task.std, dtype=self.dtype, device=self.device).view(1, -1, 1, 1)
        self.buffers, self.skips = Buffers(model, self.device), config.guard.nonfinite == "skip"
        torch_optimizer.fill_slots(optimizer)

    def put(self, batch: Batch) -> Batch:
        x = torch.from_numpy(batch["x"]).to(self.device).permute(0, 3, 1, 2)  # (n, C, H, W), uint8, in channels_last order
        if leaf.is_dotted(self.config.model.name):
            x = x.contiguous()  # many a user's model has x.view(len(x), -1)
        there = {"x": x, "y": torch.from_numpy(batch["y"]).to(self.device)}
        if "w" in batch:
            there["w"] = torch.from_numpy(batch["w"]).to(self.device, self.dtype)
        return there

    def step(self, micro: Sequence[Batch], hyper: Hyper, seed: int) -> Sums:
        torch.manual_seed(fold(seed, self.rank) & (2**63 - 1))  # dropout: each rank's own
        torch_optimizer.set_hyper(self.optimizer, hyper)
        self.model.train()
        if self.skips:
            self.buffers.remember()
        self.reducer.begin(len(micro))
        total: Sums = {"loss": 0.0, "right": 0.0, "count": 0}
        for place, batch in enumerate(micro, start=1):
            if place == len(micro):
                self.reducer.last_pass()
                self.meter.last_pass()
            loss, sums = self._forward(batch)
            (loss / hyper.batch).backward(slope(loss))  # a sum over ranks is the mean over the global batch
            total = {name: total[name] + sums[name] for name in total}
        self.reducer.finish()
        bad = any_nonfinite(self.parameters)  # of the mean over ranks, before clipping hides it: the same on every rank
        total |= {"nonfinite": bad.double() / self.size} | unless(bad, self.meter.read(hyper, total["count"]))
        if self.skips and bad:  # the host waits for the device here
            self.buffers.put_back()
        else:
            clip_(self.parameters, self.config.optim.clip_norm, self.config.optim.clip_value)
            add_noise_(self.parameters, hyper.noise, seed)
            self.reducer.apply(self.optimizer)
        self.optimizer.zero_grad()
        return total

    def settle(self, engine: Engine) -> None:
        self.buffers.settle(engine)

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
        torch_optimizer.check_maker(self.optimizer, state)
        free = "" if isinstance(self.optimizer, RuleOptimizer) else "s."  # the slots of a user's class come with its first step
        own, given = ({name: a for name, a in arrays.items() if not free or not name.startswith(free)} for arrays in (self.state(), state))
        check_fit(own, given)
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                if name in own:
                    tensor.copy_(torch.from_numpy(np.asarray(state[name])))
        for name, p in self._trained():
            start = f"s.{name}."
            torch_optimizer.load_slots(
                self.optimizer, p, {key.removeprefix(start): array for key, array in state.items() if key.startswith(start)}
            )

    def describe(self) -> str:
        count = sum(p.numel() for p in self.model.parameters())
        kind = str(self.dtype).removeprefix("torch.")
        return f"{type(self.model).__name__}, {count:,} parameters, torch {kind} on {self.device}, {self.reducer.words}"

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Every live tensor that a resume needs."""
        tensors: dict[str, torch.Tensor] = {f"p.{name}": p for name, p in self.model.named_parameters()}
        tensors |= {f"b.{name}": b for name, b in self.model.named_buffers()}
        slots = {f"s.{name}.{key}": t for name, p in self._trained() for key, t in torch_optimizer.slots(self.optimizer, p).items()}
        return tensors | slots | (torch_optimizer.maker(self.optimizer) if slots else {})

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, Sums]:
        """The loss to go backward from, and the sums over the batch."""
        training = self.model.training
        x = (batch["x"].to(self.dtype) / 255.0 - self._mean) / self._std
        if not len(x) and not training:
            return x.sum(), {"loss": 0.0, "right": 0.0, "count": 0}
        logits = self.forward(x) if training else self.model(x)
        if logits.ndim == 0:  # of no samples: nothing to learn, from nothing to count
            return logits, {"loss": 0.0, "right": 0.0, "count": 0}
        each = self.loss.each(logits, batch["y"], training)
        right = (logits.detach().argmax(1) == batch["y"]).sum()
        sums = {"loss": each.detach().double().sum(), "right": right.double(), "count": len(logits)}
        return (each * batch["w"] if "w" in batch else each).sum(), sums


def build(config: Config, origins: Origins, task: Task, engine: Engine) -> Learner:
    """The learner of frame=torch."""
    threads = fair_threads(engine)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    device = pick_device(config, origins, engine)
    check_shared(device, engine, origins)
    dtype = {"fp32": torch.float32, "fp64": torch.float64}[config.speed.precision]
    torch.manual_seed(fold(config.seed) & (2**63 - 1))
    model = normed_model(config, origins, task, engine).to(device=device, dtype=dtype)
    check_logits(model, config, origins, task)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = make_optimizer(config, origins, named)
    meter = Meter([p for _, p in named], engine.size) if config.log.noise_scale else NoMeter()  # before the reducer: its hooks come first
    optimizer, reducer = meet(config, origins, engine, optimizer, model)
    return TorchLearner(config, model, optimizer, reducer, meter, task, engine)


def make_optimizer(config: Config, origins: Origins, named: torch_reduce.Named) -> torch.optim.Optimizer:
    """The optimizer that optim.name means: one of our rules, or a class of torch.optim."""
    name, where = config.optim.name, origins.where("optim.name")
    if leaf.is_dotted(name):
        return torch_optimizer.make_user_optimizer(leaf.load_dotted(name, where), name, named, config, origins)
    return torch_optimizer.make_optimizer(build_rule(config, origins), named, config.optim.exclude == "norms_and_biases")


def check_optimizer(config: Config, origins: Origins) -> None:
    """A UserError where build() would refuse the optimizer that optim.name means, whatever the model."""
    make_optimizer(config, origins, [("weight", torch.nn.Parameter(torch.zeros(2, 2)))])


def meet(config: Config, origins: Origins, engine: Engine, optimizer: Any, model: torch.nn.Module) -> tuple[Any, torch_reduce.Reducer]:
    """The optimizer, wrapped where comm.reduce says so, and the reducer."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    kind, why = config.comm.reduce, torch_reduce.fits_horovod(optimizer, named)
    if kind == "distributed_optimizer" and (engine.name != "horovod" or why):
        why = why or f"hvd.DistributedOptimizer needs the horovod engine; this is {engine.name}"
        raise UserError(why, origins.where("comm.reduce"), "comm.reduce=auto")
    if kind == "ddp":
        return optimizer, _ddp(config, origins, engine, model)
    if engine.size == 1 and kind == "auto":
        return optimizer, torch_reduce.Alone(named)
    if engine.name == "horovod" and kind != "bucket" and not why:
        optimizer = torch_reduce.wrap_optimizer(optimizer, named)
        return optimizer, torch_reduce.InOptimizer(optimizer, named)
    reducer = torch_reduce.Buckets(named, engine, int(config.comm.bucket_mb * 2**20))
    reducer.words += f": {why}" if why and kind == "auto" and engine.name == "horovod" else ""
    return optimizer, reducer


def _ddp(config: Config, origins: Origins, engine: Engine, model: torch.nn.Module) -> torch_reduce.Reducer:
    where, fix = origins.where("comm.reduce"), "comm.reduce=auto"
    if engine.name != "torchdist":
        raise UserError(f"DDP needs the torchdist engine; this is {engine.name}", where, f"comm.engine=torchdist, or {fix}")
    if config.log.noise_scale:  # a gradient may be under way when its meter comes to read it
        raise UserError("DDP does not show a rank's own gradients, which log.noise_scale measures", where, fix)
    from hvdtrain.frames.torch_ddp import Ddp

    return Ddp(torch_reduce.Forward(model, config.norm.kind == "sync"), config.comm.bucket_mb)


def shapes(config: Config, origins: Origins, task: Task) -> dict[str, tuple[int, ...]]:
    """The trained parameters by name, as build() makes them: without memory or work, unless the model reads its own numbers."""
    try:
        with torch.device("meta"):
            model = _checked_model(config, origins, task)
    except UserError:
        raise
    except Exception:  # a meta tensor has no numbers to read; whatever else went wrong does so again
        model = _checked_model(config, origins, task)
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}


def _checked_model(config: Config, origins: Origins, task: Task) -> torch.nn.Module:
    model = normed_model(config, origins, task, Single())
    if leaf.is_dotted(config.model.name):  # the leaves fit every task; lazy layers of a user's get their shapes here
        check_logits(model, config, origins, task)
    return model
