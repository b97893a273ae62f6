"""What would fit where a job does not: other values of its keys, with the bytes that each takes, by prediction."""

from __future__ import annotations

import contextlib
import itertools

from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.training.memory.forecast import MARGIN, MemoryForecast, gib
from hvdtrain.training.memory.largest_micro import largest_micro
from hvdtrain.training.memory.room import Room


def stages_of(config: Config) -> tuple[int, ...]:
    """The values of shard.stage that go with the configuration's way to divide layers."""
    return (0, 1, 2) if config.parallel.pipeline > 1 or config.parallel.dense != "none" else (0, 1, 2, 3)


def may_recompute(config: Config) -> bool:
    """Whether model.recompute goes with the configuration's way to divide layers."""
    return config.parallel.dense == "none" and config.parallel.schedule != "zero_bubble"


def advice(forecast: MemoryForecast, room: Room) -> str:
    """The job takes 6.1 GiB of each rank, which had 4.0 (ulimit -v); shard.stage=2 takes 3.1 GiB, batch.micro=8 3.9 GiB

    Raises UserError where the job cannot be predicted.
    """
    config = forecast.config
    most = max(stages_of(config))
    higher = range(max(2, config.shard.stage + 1), most + 1) if forecast.ranks > config.parallel.ranks else ()
    stages: list[int | None] = [None, *higher]
    recomputes = [None, "all"] if config.model.recompute == "none" and may_recompute(config) else [None]
    needs = forecast.footprint().total
    parts = [f"the job takes {gib(needs)} of each rank by prediction, which had {gib(room.bytes)} ({room.limit})"]
    for stage, recompute in list(itertools.product(stages, recomputes))[1:]:
        words = f"shard.stage={stage} " * (stage is not None) + f"model.recompute={recompute}" * (recompute is not None)
        with contextlib.suppress(UserError):  # a model without blocks
            parts.append(f"{words.rstrip()} takes {gib(forecast.footprint(stage=stage, recompute=recompute).total)}")
    step = forecast.step()
    micro = largest_micro(lambda samples: MARGIN * forecast.footprint(micro=samples).total, step.micro, room.bytes)
    if 0 < micro < step.micro and config.parallel.dense_updates == 1:  # several exclude batch.micro
        parts.append(f"batch.micro={micro} takes {gib(forecast.footprint(micro=micro).total)}")
    found = forecast.footprint()
    if found.evaluation == found.tensors and forecast.evaluated > 1:
        parts.append(f"the evaluation takes most: batch.evaluate={max(1, forecast.evaluated // 4)} takes less")
    return "; ".join(parts)
