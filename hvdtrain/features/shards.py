"""shard.stage: the optimizer's state, the gradients and the weights are sharded over ranks (ZeRO,
FSDP)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from hvdtrain.config.exclusion import (
    Exclusion,
    Values,
    above,
    among,
    no_effect,
    options,
    other_than,
)
from hvdtrain.config.schema import Config
from hvdtrain.core.extras import implementation
from hvdtrain.errors import UserError
from hvdtrain.features.comm import not_on_horovod
from hvdtrain.features.job_feature import Conflict, JobFeature, PlannedJob


def _cuts_weights(config: Config) -> bool:
    """Whether torch's FSDP2 shards the weights. JAX supports the settings that FSDP2 does not, or
    rejects them at every stage."""
    return config.shard.stage == 3 and config.framework == "torch"


def _has_whole_weights(config: Config) -> bool:
    return config.shard.stage < 3


def _keeps_own_gradients(job: PlannedJob) -> Iterator[UserError]:
    """Yields an error for log.noise_scale: stage 2 keeps a rank's local gradients for only one
    micro-batch, stage 3 does not keep them."""
    batch = job.config.batch
    stage = job.config.shard.stage
    if not job.config.log.noise_scale or stage < 2:
        return
    several = batch.micro == "auto" or (
        isinstance(batch.micro, int) and -(-batch.size // job.ranks) > batch.micro
    )
    if stage == 3 or several or job.config.recipe.growth != "none":
        when = "" if stage == 3 else " of several micro-batches"
        what = (
            f"log.noise_scale reads each rank's own gradients{when}, which shard.stage={stage} "
            "does not keep"
        )
        yield UserError(
            what, job.where("log.noise_scale"), "shard.stage=1, or log.noise_scale=false"
        )


_FULLY = "shard.stage=3"


def fully_sharded(config: Config) -> Any:
    """Returns the module of the extra that divides all weights. Raises UserError if it is not
    installed."""
    module = implementation(_FULLY)
    if module is None:
        raise SHARDS.not_installed(config)
    return importlib.import_module(module)


SHARDS = JobFeature(
    key="shard.stage",
    on=lambda config: config.shard.stage > 0,
    arrangement=lambda config: fully_sharded(config).ARRANGEMENT if config.shard.stage == 3 else "",
    extra_values=(_FULLY,),
    updates_whole_weights=False,
    examples=(
        *("shard.stage=1", "shard.stage=2", "shard.stage=3", "shard.stage=1 shard.group=node"),
        *(
            "shard.stage=1 shard.offload=optimizer",
            "shard.stage=3 shard.reshard=false",
            "shard.stage=3 shard.offload=parameters",
        ),
    ),
    off="shard.stage=0",
    why="gradients are reduced to the rank that updates them",
    without=(
        *options("shard.stage", {"shard.group": "node"}, fix="shard.stage=1"),
        *options("shard.stage=3", {"shard.reshard": False}, when=_has_whole_weights),
        no_effect(
            "shard.offload", among("parameters"), without="shard.stage=3", when=_has_whole_weights
        ),
        no_effect("shard.offload", among("optimizer"), without="shard.stage", fix="shard.stage=1"),
    ),
    excludes=(
        Exclusion("comm.op", among("adasum")),
        Exclusion("comm.local_steps", above(1)),
        Exclusion("comm.compression", other_than("none", "fp16")),
        Exclusion("comm.reduce", among("ddp", "distributed_optimizer")),
        Exclusion(
            "comm.reduce",
            among("bucket"),
            when=_cuts_weights,
            words="shard.stage=3",
            why="FSDP2 reduces gradients itself",
        ),
        Exclusion("comm.tune", among(True)),
        Exclusion(
            "speed.compile",
            other_than("none", "default"),
            when=_cuts_weights,
            words="shard.stage=3",
            why="not implemented yet",
        ),
        Exclusion(
            "speed.channels_last",
            Values(bool, True),
            when=_cuts_weights,
            words="shard.stage=3",
            why="not implemented yet",
        ),
        *not_on_horovod(_cuts_weights, "shard.stage=3"),
    ),
    rules=(
        Conflict(
            lambda job: _cuts_weights(job.config) and "horovod_api" in job.features,
            what="{chosen} needs torch's process groups, which the {engine} engine does not create",
            fix="comm.engine=mpi with the same mpirun, or shard.stage=2",
            key="comm.engine",
        ),
        _keeps_own_gradients,
        Exclusion(
            "model.recompute",
            Values(lambda blocks: isinstance(blocks, int), 2),
            what="{chosen} in JAX recomputes every block, so {set} has no effect",
            fix="model.recompute=all or none",
            when=lambda config: config.framework == "jax" and config.shard.stage == 3,
        ),
    ),
)
