"""Which strategy reduces the gradients of the ranks, by comm.reduce, the engine, and what both can do."""

from __future__ import annotations

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.read import Provenance
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import check_knobs
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.parallel.buckets import COMPRESSED_TYPES, Buckets
from hvdtrain.frameworks.torch.parallel.horovod import HorovodOptimizer, fits_horovod
from hvdtrain.frameworks.torch.parallel.local_sgd import LocalSGD
from hvdtrain.frameworks.torch.parallel.strategy import NamedParameters, SingleProcess, Strategy
from hvdtrain.frameworks.torch.parallel.tune_buckets import fastest_bucket_bytes


def select_strategy(
    config: Config,
    provenance: Provenance,
    communicator: Communicator,
    named: NamedParameters,
    optimizer: torch.optim.Optimizer,
    stopwatch: Stopwatch,
) -> Strategy:
    """The strategy for the trained parameters and their optimizer, which it has not wrapped yet. Every rank calls it.

    Raises UserError where the engine, the optimizer or the parameters cannot do what comm.reduce asks for.
    """
    comm = config.comm
    refuse(config, provenance, communicator)
    needs_buckets = comm.compression != "none" or comm.op == "adasum" or comm.local_steps > 1  # Horovod's optimizer has none of these
    unfit = "" if needs_buckets else fits_horovod(optimizer, named)
    if comm.reduce == "distributed_optimizer" and "horovod_api" not in communicator.features:
        unfit = unfit or f"hvd.DistributedOptimizer needs the horovod engine; this is {communicator.name}"
    if comm.reduce == "distributed_optimizer" and unfit:
        raise UserError(unfit, provenance.where("comm.reduce"), "comm.reduce=auto")
    if comm.reduce == "ddp":
        return _ddp(config, provenance, communicator, named)
    if communicator.size == 1 and comm.reduce == "auto":
        return SingleProcess(named)
    if comm.local_steps > 1:
        return LocalSGD(named, communicator, comm.local_steps, int(comm.bucket_mb * 2**20), stopwatch)
    if "horovod_api" in communicator.features and comm.reduce != "bucket" and not unfit and not needs_buckets:
        return HorovodOptimizer(named, communicator)
    buckets = _buckets(config, named, communicator, stopwatch)
    if unfit and comm.reduce == "auto" and "horovod_api" in communicator.features:
        buckets.summary += f": {unfit}"
    return buckets


def _buckets(config: Config, named: NamedParameters, communicator: Communicator, stopwatch: Stopwatch) -> Buckets:
    comm = config.comm
    if comm.op == "adasum":  # a bucket of its own for each tensor: Adasum takes their angles one by one
        return Buckets(named, communicator, 0, stopwatch, op="adasum")
    compressed = COMPRESSED_TYPES.get(comm.compression)
    if not comm.tune or communicator.size == 1:
        return Buckets(named, communicator, int(comm.bucket_mb * 2**20), stopwatch, compressed)
    tuned = fastest_bucket_bytes(named, communicator, compressed)
    buckets = Buckets(named, communicator, tuned.bucket_bytes, stopwatch, compressed)
    buckets.summary += f" of {tuned.bucket_bytes / 2**20:g} MiB, as tuned ({1e3 * tuned.seconds:.2g} ms for all)"
    return buckets


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


def _ddp(config: Config, provenance: Provenance, communicator: Communicator, named: NamedParameters) -> Strategy:
    where, fix = provenance.where("comm.reduce"), "comm.reduce=auto"
    if communicator.name != "torchdist":
        raise UserError(f"DDP needs the torchdist engine; this is {communicator.name}", where, f"comm.engine=torchdist, or {fix}")
    if config.log.noise_scale:  # a gradient may be under way when its meter comes to read it
        raise UserError("DDP does not show a rank's own gradients, which log.noise_scale measures", where, fix)
    from hvdtrain.frameworks.torch.parallel.ddp import Ddp

    return Ddp(named, config.comm.bucket_mb)
