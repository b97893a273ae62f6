"""Which way the gradients of the ranks meet, by comm.reduce, the engine, and what both can do."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.read import Provenance
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import check_knobs
from hvdtrain.frameworks.torch.compile import forwards
from hvdtrain.frameworks.torch.parallel.buckets import WIRES, Buckets
from hvdtrain.frameworks.torch.parallel.horovod import HorovodOptimizer, fits_horovod, wrap_optimizer
from hvdtrain.frameworks.torch.parallel.local_sgd import LocalSGD
from hvdtrain.frameworks.torch.parallel.strategy import Named, SingleProcess, Strategy
from hvdtrain.frameworks.torch.parallel.tune_buckets import fastest_bucket_bytes


def select_strategy(
    config: Config, provenance: Provenance, communicator: Communicator, optimizer: Any, model: torch.nn.Module
) -> tuple[Any, Strategy]:
    """The optimizer, wrapped where comm.reduce says so, and the strategy. Every rank calls it."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    comm, kind = config.comm, config.comm.reduce
    refuse(config, provenance, communicator)
    own_ways = comm.compression != "none" or comm.op == "adasum" or comm.local_steps > 1  # which buckets alone have
    why = "" if own_ways else fits_horovod(optimizer, named)
    if kind == "distributed_optimizer" and ("horovod_api" not in communicator.features or why):
        why = why or f"hvd.DistributedOptimizer needs the horovod engine; this is {communicator.name}"
        raise UserError(why, provenance.where("comm.reduce"), "comm.reduce=auto")
    if kind == "ddp":
        return optimizer, _ddp(config, provenance, communicator, model)
    if communicator.size == 1 and kind == "auto":
        return optimizer, SingleProcess(named)
    if comm.local_steps > 1:
        return optimizer, LocalSGD(named, communicator, comm.local_steps, int(comm.bucket_mb * 2**20))
    if "horovod_api" in communicator.features and kind != "bucket" and not why and not own_ways:
        optimizer = wrap_optimizer(optimizer, named)
        return optimizer, HorovodOptimizer(optimizer, named)
    strategy = _buckets(config, named, communicator)
    strategy.words += f": {why}" if why and kind == "auto" and "horovod_api" in communicator.features else ""
    return optimizer, strategy


def _buckets(config: Config, named: Named, communicator: Communicator) -> Buckets:
    comm = config.comm
    if comm.op == "adasum":  # a bucket of its own for each tensor: Adasum takes their angles one by one
        return Buckets(named, communicator, 0, None, "adasum")
    wire = WIRES.get(comm.compression)
    if not comm.tune or communicator.size == 1:
        return Buckets(named, communicator, int(comm.bucket_mb * 2**20), wire)
    best, words = fastest_bucket_bytes(named, communicator, wire)
    strategy = Buckets(named, communicator, best, wire)
    strategy.words += words
    return strategy


def refuse(config: Config, provenance: Provenance, communicator: Communicator) -> None:
    """A UserError for wishes about gradients that contradict each other, or that this engine cannot fulfil."""
    comm, horovod = config.comm, communicator.name == "horovod"
    uneven = [count for count in (config.log.every_steps, config.checkpoint.every_steps) if count and count % comm.local_steps]
    whole = {"compression": comm.compression != "none", "op": comm.op == "adasum", "local_steps": comm.local_steps > 1}
    chosen = [f"comm.{key}={getattr(comm, key)}" for key, given in whole.items() if given]
    joined = "norm.kind=sync joins the ranks in every step"
    alone = f"{comm.reduce} has no {' '.join(chosen)}"
    is_sync_point = f"the ranks meet every {uneven[0] if uneven else 0} steps, where they average too"
    untuned = comm.local_steps > 1 or comm.op == "adasum" or comm.reduce == "ddp"
    parts = "a rank that skips a step by itself parts from the others"
    scales = "each rank would have a loss scale of its own"
    fewer = f"Adasum takes 2, 4, 8, ... ranks; these are {communicator.size}"
    wrong = [
        (len(chosen) > 1, "op", f"{' and '.join(chosen)} do not go together", "one of them"),
        (bool(chosen) and comm.reduce in ("distributed_optimizer", "ddp"), "reduce", alone, "comm.reduce=auto"),
        (comm.op == "adasum" and not horovod, "op", f"Adasum is Horovod's; this is {communicator.name}", "comm.engine=horovod"),
        (comm.op == "adasum" and communicator.size & (communicator.size - 1) != 0, "op", fewer, "another number of ranks, or comm.op=mean"),
        (comm.compression == "bf16" and horovod, "compression", "Horovod has no bfloat16", "comm.compression=fp16, or another comm.engine"),
        (comm.compression != "none" and config.speed.precision == "fp64", "compression", "it would round float64", "comm.compression=none"),
        (comm.local_steps > 1 and comm.reduce == "bucket", "reduce", "local steps have no gradients for buckets", "comm.reduce=auto"),
        (comm.local_steps > 1 and bool(uneven), "local_steps", is_sync_point, f"log.every_steps={comm.local_steps}, or a multiple of it"),
        (comm.local_steps > 1 and config.speed.precision == "fp16", "local_steps", scales, "speed.precision=bf16"),
        (comm.local_steps > 1 and config.guard.nonfinite == "skip", "local_steps", parts, "guard.nonfinite=stop"),
        (comm.tune and untuned, "tune", "there are no buckets to tune", "comm.tune=false"),
        (comm.local_steps > 1 and config.log.noise_scale, "local_steps", "no common gradient for log.noise_scale", "comm.local_steps=1"),
        (comm.local_steps > 1 and config.norm.kind == "sync", "local_steps", joined, "comm.local_steps=1, or norm.kind=ghost"),
    ]  # fmt: skip
    check_knobs(config, provenance, communicator)
    for is_wrong, key, what, fix in wrong:
        if is_wrong:
            raise UserError(what, provenance.where(f"comm.{key}"), fix)


def _ddp(config: Config, provenance: Provenance, communicator: Communicator, model: torch.nn.Module) -> Strategy:
    where, fix = provenance.where("comm.reduce"), "comm.reduce=auto"
    if communicator.name != "torchdist":
        raise UserError(f"DDP needs the torchdist engine; this is {communicator.name}", where, f"comm.engine=torchdist, or {fix}")
    if config.log.noise_scale:  # a gradient may be under way when its meter comes to read it
        raise UserError("DDP does not show a rank's own gradients, which log.noise_scale measures", where, fix)
    from hvdtrain.frameworks.torch.parallel.ddp import Ddp

    return Ddp(forwards(config, model, None)[0], config.comm.bucket_mb)
