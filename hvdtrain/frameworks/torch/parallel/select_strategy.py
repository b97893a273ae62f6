"""Which way the gradients of the ranks meet, by comm.reduce, the engine, and what both can do."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.comm.communicator import Engine
from hvdtrain.config.read import Origins
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import check_knobs
from hvdtrain.frameworks.torch.compile import forwards
from hvdtrain.frameworks.torch.parallel import strategy
from hvdtrain.frameworks.torch.parallel.buckets import WIRES, Buckets
from hvdtrain.frameworks.torch.parallel.local_sgd import Local
from hvdtrain.frameworks.torch.parallel.tune_buckets import fastest_bucket_bytes


def meet(config: Config, origins: Origins, engine: Engine, optimizer: Any, model: torch.nn.Module) -> tuple[Any, strategy.Reducer]:
    """The optimizer, wrapped where comm.reduce says so, and the reducer. Every rank calls it."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    comm, kind = config.comm, config.comm.reduce
    refuse(config, origins, engine)
    own_ways = comm.wire != "same" or comm.op == "adasum" or comm.every > 1  # which buckets alone have
    why = "" if own_ways else strategy.fits_horovod(optimizer, named)
    if kind == "distributed_optimizer" and (engine.name != "horovod" or why):
        why = why or f"hvd.DistributedOptimizer needs the horovod engine; this is {engine.name}"
        raise UserError(why, origins.where("comm.reduce"), "comm.reduce=auto")
    if kind == "ddp":
        return optimizer, _ddp(config, origins, engine, model)
    if engine.size == 1 and kind == "auto":
        return optimizer, strategy.Alone(named)
    if comm.every > 1:
        return optimizer, Local(named, engine, comm.every, int(comm.bucket_mb * 2**20))
    if engine.name == "horovod" and kind != "bucket" and not why and not own_ways:
        optimizer = strategy.wrap_optimizer(optimizer, named)
        return optimizer, strategy.InOptimizer(optimizer, named)
    reducer = _buckets(config, named, engine)
    reducer.words += f": {why}" if why and kind == "auto" and engine.name == "horovod" else ""
    return optimizer, reducer


def _buckets(config: Config, named: strategy.Named, engine: Engine) -> Buckets:
    comm = config.comm
    if comm.op == "adasum":  # a bucket of its own for each tensor: Adasum takes their angles one by one
        return Buckets(named, engine, 0, None, "adasum")
    wire = WIRES.get(comm.wire)
    if not comm.tune or engine.size == 1:
        return Buckets(named, engine, int(comm.bucket_mb * 2**20), wire)
    best, words = fastest_bucket_bytes(named, engine, wire)
    reducer = Buckets(named, engine, best, wire)
    reducer.words += words
    return reducer


def refuse(config: Config, origins: Origins, engine: Engine) -> None:
    """A UserError for wishes about gradients that contradict each other, or that this engine cannot fulfil."""
    comm, horovod = config.comm, engine.name == "horovod"
    uneven = [count for count in (config.log.every_steps, config.checkpoint.every_steps) if count and count % comm.every]
    whole = {"wire": comm.wire != "same", "op": comm.op == "adasum", "every": comm.every > 1}
    chosen = [f"comm.{key}={getattr(comm, key)}" for key, given in whole.items() if given]
    joined = "norm.kind=sync joins the ranks in every step"
    alone = f"{comm.reduce} has no {' '.join(chosen)}"
    meets = f"the ranks meet every {uneven[0] if uneven else 0} steps, where they average too"
    untuned = comm.every > 1 or comm.op == "adasum" or comm.reduce == "ddp"
    parts = "a rank that skips a step by itself parts from the others"
    scales = "each rank would have a loss scale of its own"
    fewer = f"Adasum takes 2, 4, 8, ... ranks; these are {engine.size}"
    wrong = [
        (len(chosen) > 1, "op", f"{' and '.join(chosen)} do not go together", "one of them"),
        (bool(chosen) and comm.reduce in ("distributed_optimizer", "ddp"), "reduce", alone, "comm.reduce=auto"),
        (comm.op == "adasum" and not horovod, "op", f"Adasum is Horovod's; this is {engine.name}", "comm.engine=horovod"),
        (comm.op == "adasum" and engine.size & (engine.size - 1) != 0, "op", fewer, "another number of ranks, or comm.op=mean"),
        (comm.wire == "bf16" and horovod, "wire", "Horovod has no bfloat16", "comm.wire=fp16, or comm.engine=torchdist or mpi"),
        (comm.wire != "same" and config.speed.precision == "fp64", "wire", "a narrow wire of float64 gradients", "comm.wire=same"),
        (comm.every > 1 and comm.reduce == "bucket", "reduce", "local steps have no gradients for buckets", "comm.reduce=auto"),
        (comm.every > 1 and bool(uneven), "every", meets, f"log.every_steps={comm.every}, or a multiple of it"),
        (comm.every > 1 and config.speed.precision == "fp16", "every", scales, "speed.precision=bf16"),
        (comm.every > 1 and config.guard.nonfinite == "skip", "every", parts, "guard.nonfinite=stop"),
        (comm.tune and untuned, "tune", "there are no buckets to tune", "comm.tune=false"),
        (comm.every > 1 and config.log.noise_scale, "every", "local steps have no common gradient for log.noise_scale", "comm.every=1"),
        (comm.every > 1 and config.norm.kind == "sync", "every", joined, "comm.every=1, or norm.kind=ghost"),
    ]  # fmt: skip
    check_knobs(config, origins, engine)
    for is_wrong, key, what, fix in wrong:
        if is_wrong:
            raise UserError(what, origins.where(f"comm.{key}"), fix)


def _ddp(config: Config, origins: Origins, engine: Engine, model: torch.nn.Module) -> strategy.Reducer:
    where, fix = origins.where("comm.reduce"), "comm.reduce=auto"
    if engine.name != "torchdist":
        raise UserError(f"DDP needs the torchdist engine; this is {engine.name}", where, f"comm.engine=torchdist, or {fix}")
    if config.log.noise_scale:  # a gradient may be under way when its meter comes to read it
        raise UserError("DDP does not show a rank's own gradients, which log.noise_scale measures", where, fix)
    from hvdtrain.frameworks.torch.parallel.ddp import Ddp

    return Ddp(forwards(config, model, None)[0], config.comm.bucket_mb)
