"""WholeModel, the arrangement in which each rank has the whole model; comm.* and shard.stage=1 or 2
choose how gradients are reduced."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.core.lengths import read_length
from hvdtrain.errors import UserError
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.arrangement import Arrangement
from hvdtrain.frameworks.torch.parallel.buckets import (
    COMPRESSED_TYPES,
    Buckets,
    fastest_bucket_bytes,
)
from hvdtrain.frameworks.torch.parallel.by_library import Ddp, HorovodOptimizer, fits_horovod
from hvdtrain.frameworks.torch.strategy import NamedParameters, Strategy, nccl_ranks
from hvdtrain.recipe.clock import epoch_multiplier

if TYPE_CHECKING:  # few jobs have local steps
    from hvdtrain.frameworks.torch.parallel.local_sgd import LocalSGD


class WholeModel(Arrangement):
    """The default arrangement."""

    def strategy(self, named: NamedParameters, optimizer: torch.optim.Optimizer) -> Strategy:
        making = self.making
        return select_strategy(
            making.config, making.mesh, named, optimizer, making.stopwatch, making.prefix
        )


def select_strategy(
    config: Config,
    mesh: Mesh,
    named: NamedParameters,
    optimizer: torch.optim.Optimizer,
    stopwatch: Stopwatch,
    prefix: str = "",
) -> Strategy:
    """Returns the strategy for the trained parameters and their optimizer, which is not wrapped
    yet. Every rank calls it. shard.stage=3 and some arrangements have other strategies. prefix:
    begins the names of the collectives of buckets.

    training/conflicts.py has refused what the configuration or the engine excludes. Raises
    UserError if comm.reduce=distributed_optimizer asks Horovod to wrap an optimizer or parameters
    that it cannot wrap.
    """
    comm = config.comm
    communicator = mesh.data
    bucket_bytes = bucket_bytes_of(config, named, communicator)
    if config.shard.stage in (1, 2):
        from hvdtrain.frameworks.torch.parallel.zero_1_and_2 import ZeroStrategy

        on_host = config.shard.offload != "none"
        stage = config.shard.stage
        return ZeroStrategy(named, mesh, stage, bucket_bytes, stopwatch, on_host, prefix)
    # Horovod's optimizer supports none of these
    needs_buckets = comm.compression != "none" or comm.op == "adasum" or comm.local_steps > 1
    unfit = "" if needs_buckets else fits_horovod(optimizer, named)
    if comm.reduce == "distributed_optimizer" and unfit:
        raise UserError(unfit, config.where("comm.reduce"), "comm.reduce=auto")
    if comm.reduce == "ddp":
        return Ddp(named, bucket_bytes / 2**20, timedelta(seconds=comm.timeout_s))
    if communicator.size == 1 and comm.reduce == "auto":
        return Strategy(named)
    if comm.local_steps > 1:
        from hvdtrain.frameworks.torch.parallel.local_sgd import LocalSGD

        local = LocalSGD(named, communicator, comm.local_steps, bucket_bytes, stopwatch)
        return from_its_begin(config, named, communicator, local, stopwatch)
    if (
        "horovod_api" in communicator.features
        and comm.reduce != "bucket"
        and not unfit
        and not needs_buckets
        and config.parallel.part_ranks == 1
    ):
        return HorovodOptimizer(named, communicator)
    buckets = _buckets(config, named, communicator, bucket_bytes, stopwatch, prefix)
    if unfit and comm.reduce == "auto" and "horovod_api" in communicator.features:
        buckets.summary += f": {unfit}"
    return buckets


def bucket_bytes_of(config: Config, named: NamedParameters, communicator: Communicator) -> int:
    """Returns the size of a bucket of these parameters."""
    # a stage of a pipeline may have no trained parameter
    device = named[0][1].device if named else torch.device("cpu")
    return config.comm.bucket_bytes(nccl_ranks(device, communicator))


def from_its_begin(
    config: Config,
    named: NamedParameters,
    communicator: Communicator,
    local: LocalSGD,
    stopwatch: Stopwatch,
) -> Strategy:
    """Returns local steps; before comm.local_from, gradients are reduced in every step."""
    begin = read_length(config.comm.local_from)
    if not begin.amount:
        return local
    from hvdtrain.frameworks.torch.parallel.local_sgd import PostLocalSGD

    bucket_bytes = bucket_bytes_of(config, named, communicator)
    together = Buckets(named, communicator, bucket_bytes, stopwatch)
    return PostLocalSGD(together, local, begin.words(epoch_multiplier(config)))


def _buckets(
    config: Config,
    named: NamedParameters,
    communicator: Communicator,
    bucket_bytes: int,
    stopwatch: Stopwatch,
    prefix: str,
) -> Buckets:
    comm = config.comm
    if comm.op == "adasum":  # one bucket for each tensor: Adasum computes an angle for each
        return Buckets(named, communicator, 0, stopwatch, op="adasum", prefix=prefix)
    compressed = COMPRESSED_TYPES.get(comm.compression)
    if not comm.tune or communicator.size == 1:
        return Buckets(named, communicator, bucket_bytes, stopwatch, compressed, prefix=prefix)
    tuned = fastest_bucket_bytes(named, communicator, compressed)
    buckets = Buckets(named, communicator, tuned.bucket_bytes, stopwatch, compressed, prefix=prefix)
    buckets.summary += (
        f" of {tuned.bucket_bytes / 2**20:g} MiB, as tuned ({1e3 * tuned.seconds:.2g} ms for all)"
    )
    return buckets
