"""The torch frame: one rank's model, optimizer and arithmetic in PyTorch."""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from hvdtrain import leaf
from hvdtrain.comm.engine import Engine
from hvdtrain.config import Config
from hvdtrain.configure import Origins
from hvdtrain.errors import UserError
from hvdtrain.frames import torch_optimizer, torch_reduce
from hvdtrain.frames.learner import Learner, Task, build_rule, check_fit
from hvdtrain.state import Arrays, Batch, Hyper, Sums, fold

LossSum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # logits (n, classes), labels (n,) -> sum over samples


class TorchLearner:
    """A torch model that gives logits (n, classes) for images (n, C, H, W)."""

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, reducer: torch_reduce.Reducer, loss_sum: LossSum, task: Task, dtype: torch.dtype
    ) -> None:
        self.model, self.optimizer, self.reducer, self.loss_sum, self.dtype = model, optimizer, reducer, loss_sum, dtype
        self.device = next(model.parameters()).device
        self._mean = torch.tensor(task.mean, dtype=dtype, device=self.device).view(1, -1, 1, 1)
        self._std = torch.tensor(task.std, dtype=dtype, device=self.device).view(1, -1, 1, 1)
        torch_optimizer.fill_slots(optimizer)

    def put(self, batch: Batch) -> Batch:
        x = torch.from_numpy(batch["x"]).to(self.device).permute(0, 3, 1, 2)  # (n, C, H, W), uint8
        return {"x": x, "y": torch.from_numpy(batch["y"]).to(self.device)}

    def step(self, micro: Sequence[Batch], hyper: Hyper, seed: int) -> Sums:
        torch.manual_seed(seed & (2**63 - 1))  # dropout
        torch_optimizer.set_hyper(self.optimizer, hyper)
        self.model.train()
        self.reducer.begin(len(micro))
        total: Sums = {"loss": 0.0, "right": 0.0, "count": 0}
        for place, batch in enumerate(micro, start=1):
            if place == len(micro):
                self.reducer.last_pass()
            loss, sums = self._forward(batch)
            (loss / hyper.batch).backward()  # a sum over ranks is the mean over the global batch
            total = {name: total[name] + sums[name] for name in total}
        self.reducer.finish()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def settle(self, engine: Engine) -> None:
        """Running statistics of norms become their mean over ranks, other buffers rank 0's."""
        if engine.size == 1:
            return
        here = torch_reduce.meeting_place(self.device, engine)
        buffers = dict(self.model.named_buffers())
        running = {name: b for name, b in buffers.items() if name.endswith((".running_mean", ".running_var"))}
        if running:
            flat = torch.cat([b.flatten() for b in running.values()]) / engine.size
            flat = engine.allreduce(flat.to(here), "settle")
            for buffer, part in zip(running.values(), flat.split([b.numel() for b in running.values()]), strict=True):
                buffer.copy_(part.view(buffer.shape))
        for name, buffer in buffers.items():
            if name not in running:
                buffer.copy_(engine.broadcast(buffer.detach().to(here, copy=True), f"settle.{name}"))

    def evaluate(self, batch: Batch) -> Sums:
        self.model.eval()
        with torch.no_grad():
            return self._forward(batch)[1]

    def state(self) -> Arrays:
        return {name: tensor.detach().cpu().numpy().copy() for name, tensor in self._tensors().items()}

    def load(self, state: Arrays) -> None:
        check_fit(self.state(), state)
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(torch.from_numpy(np.asarray(state[name])))

    def describe(self) -> str:
        count = sum(p.numel() for p in self.model.parameters())
        kind = str(self.dtype).removeprefix("torch.")
        return f"{type(self.model).__name__}, {count:,} parameters, torch {kind} on {self.device}, {self.reducer.words}"

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Every live tensor that a resume needs."""
        tensors: dict[str, torch.Tensor] = {f"p.{name}": p for name, p in self.model.named_parameters()}
        tensors |= {f"b.{name}": b for name, b in self.model.named_buffers()}
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                tensors |= {f"s.{name}.{i}": slot for i, slot in enumerate(torch_optimizer.slots(self.optimizer, p))}
        return tensors

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, Sums]:
        """The loss to go backward from, and the sums over the batch."""
        if len(batch["y"]) == 0:  # no sample for this rank: gradients of zero, without batch statistics of nothing
            nothing = torch.stack([p.sum() for p in self.model.parameters() if p.requires_grad]).sum() * 0.0
            return nothing, {"loss": 0.0, "right": 0.0, "count": 0}
        logits = self.model((batch["x"].to(self.dtype) / 255.0 - self._mean) / self._std)
        loss = self.loss_sum(logits, batch["y"])
        right = (logits.detach().argmax(1) == batch["y"]).sum()
        return loss, {"loss": loss.detach().double(), "right": right.double(), "count": len(logits)}


def squared_error_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Half the squared distance to the one-hot label, summed over samples and classes."""
    return 0.5 * (logits - functional.one_hot(labels, logits.shape[1]).to(logits.dtype)).square().sum()


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the softmax, summed over samples."""
    return functional.cross_entropy(logits, labels, reduction="sum")


def build(config: Config, origins: Origins, task: Task, engine: Engine) -> Learner:
    """The learner of frame=torch."""
    share_cores(engine)
    device = pick_device(config, origins, engine)
    dtype = {"fp32": torch.float32, "fp64": torch.float64}[config.speed.precision]
    torch.manual_seed(fold(config.seed) & (2**63 - 1))
    model = build_model(config, origins, task).to(device=device, dtype=dtype)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch_optimizer.make_optimizer(build_rule(config, origins), [p for _, p in named])
    optimizer, reducer = meet(config, origins, engine, optimizer, named)
    loss_sum = squared_error_sum if config.model.loss == "squared_error" else cross_entropy_sum
    learner = TorchLearner(model, optimizer, reducer, loss_sum, task, dtype)
    check_logits(learner, task, origins)
    return learner


def check_logits(learner: TorchLearner, task: Task, origins: Origins) -> None:
    """One forward pass of two black images: the model gives a row of logits for each."""
    images = torch.zeros((2, task.shape[2], *task.shape[:2]), dtype=learner.dtype, device=learner.device)
    with torch.no_grad():
        logits = learner.model.eval()(images)
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2 or len(logits) != 2 or logits.shape[1] < task.classes:
        shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        what = f"for images {tuple(images.shape)} the model gives {shape}, not logits (2, {task.classes})"
        raise UserError(what, origins.where("model.name"), "end the model with one output for each class")


def build_model(config: Config, origins: Origins, task: Task) -> torch.nn.Module:
    """A leaf of models/ by name, or the user's own package.module:Class, which is given shape and classes where it asks for them."""
    name, options, where = config.model.name, config.model.options, origins.where("model.name")
    if ":" not in name:
        make = leaf.load("models", name, where).build
        return make(name, task.shape, task.classes, **leaf.check_options(make, options, "model", origins))
    make = leaf.load_dotted(name, where)
    signature = inspect.signature(make)
    known: dict[str, Any] = {"shape": task.shape, "classes": task.classes}
    arguments = {key: value for key, value in known.items() if key in signature.parameters} | dict(options)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UserError(f"{name}{signature} does not fit: {error}", where, "give its parameters as model.<name>=<value>") from None
    model = make(**arguments)
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"{name} gave a {type(model).__name__}, not a torch.nn.Module", where, "give a class of modules, or another frame=")
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"{name} has no parameter to train", where, "give a model with parameters that require a gradient")
    return model


def meet(config: Config, origins: Origins, engine: Engine, optimizer: Any, named: torch_reduce.Named) -> tuple[Any, torch_reduce.Reducer]:
    """The optimizer, wrapped where comm.reduce says so, and the reducer."""
    kind, why = config.comm.reduce, torch_reduce.fits_horovod(named)
    if kind == "distributed_optimizer" and (engine.name != "horovod" or why):
        why = why or f"hvd.DistributedOptimizer needs the horovod engine; this is {engine.name}"
        raise UserError(why, origins.where("comm.reduce"), "comm.reduce=auto")
    if engine.size == 1 and kind == "auto":
        return optimizer, torch_reduce.Alone(named)
    if engine.name == "horovod" and kind != "bucket" and not why:
        optimizer = torch_reduce.wrap_optimizer(optimizer, named)
        return optimizer, torch_reduce.InOptimizer(optimizer, named)
    reducer = torch_reduce.Buckets(named, engine, int(config.comm.bucket_mb * 2**20))
    reducer.words += f": {why}" if why and kind == "auto" else ""
    return optimizer, reducer


def pick_device(config: Config, origins: Origins, engine: Engine) -> torch.device:
    """The GPU of this rank's local rank, or the CPU."""
    count = torch.cuda.device_count()
    if config.speed.device == "cuda" and not count:
        raise UserError("no CUDA device is visible", origins.where("speed.device"), "speed.device=cpu, or a torch built for this GPU")
    if config.speed.device != "cpu" and count:
        device = torch.device("cuda", engine.local_rank % count)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def share_cores(engine: Engine) -> None:
    """Each rank computes with its part of the cores that it may use; OMP_NUM_THREADS wins. Every rank calls it."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    mine = (socket.gethostname(), tuple(cores))
    sharers = engine.exchange(mine).count(mine)  # the launcher may give each rank cores of its own, or all ranks the same
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(cores) // sharers))
