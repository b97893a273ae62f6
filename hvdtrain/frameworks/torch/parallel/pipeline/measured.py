"""The seconds that the units of a model take on a rank's device, with the samples and the number types of the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.rank_0 import on_rank_0
from hvdtrain.config.schema import Config
from hvdtrain.frameworks.torch.parallel.pipeline.schedule import Seconds
from hvdtrain.frameworks.torch.parallel.pipeline.stages import Stage, Unit, measured_seconds

Autocast = Callable[[torch.device], AbstractContextManager[Any]]  # in which layers compute


def samples_of_pass(config: Config, pipelines: int) -> int:
    """The most samples of a micro-batch in the job's first step; config.batch.size is resolved."""
    share, parallel = -(-config.batch.size // pipelines), config.parallel
    if isinstance(config.batch.micro, int):
        return min(share, config.batch.micro)
    return -(-share // (parallel.micro_batches or 2 * parallel.pipeline))


def agreed_seconds(units: Sequence[Unit], x: torch.Tensor, autocast: Autocast, communicator: Communicator) -> list[Seconds]:
    """own_seconds() of rank 0, on all ranks, or its UserError. A collective."""
    return [Seconds(*each) for each in on_rank_0(communicator, lambda: [tuple(each) for each in own_seconds(units, x, autocast)])]


def own_seconds(units: Sequence[Unit], x: torch.Tensor, autocast: Autocast) -> list[Seconds]:
    """Seconds of a forward and a backward pass of x, (n, ...), in training mode. Raises UserError for a unit that fails."""
    Stage(units).train()
    return measured_seconds([unit._replace(call=_in_precision(unit.call, autocast)) for unit in units], x)


def _in_precision(call: Callable[[torch.Tensor], Any], autocast: Autocast) -> Callable[[torch.Tensor], Any]:
    def called(x: torch.Tensor) -> Any:
        with autocast(x.device):
            return call(x)

    return called
