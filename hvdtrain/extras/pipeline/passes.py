"""PipelinePasses: the passes of a step, or of an evaluation, through the stages of
parallel.pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums, add_sums, zero_sums
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.extras.pipeline.pipelined import Pipelined
from hvdtrain.frameworks.learner import CurrentPass, TimedPass, Waited
from hvdtrain.frameworks.torch.call import only_one
from hvdtrain.frameworks.torch.forward import Evaluated
from hvdtrain.frameworks.torch.inputs import DeviceBatch, split_batch
from hvdtrain.frameworks.torch.step import Passes
from hvdtrain.frameworks.torch.strategy import OnePass


class PipelinePasses(Passes):
    """The passes of parallel.pipeline: all micro-batches of a step in one call. The last stage's
    rank has the sums."""

    def __init__(self, config: Config, *of_passes: Any, pipelined: Pipelined, mesh: Mesh) -> None:
        """of_passes: arguments of Passes."""
        super().__init__(config, *of_passes)
        self._config = config
        self._pipelined = pipelined
        self._mesh = mesh

    def of_step(self, hyper: Hyper, optimizer: torch.optim.Optimizer) -> OnePass:
        return self._all

    def _all(self, micro: Sequence[DeviceBatch], divisor: float, is_last: bool) -> Sums:
        sums = zero_sums(self._forward.task.sums)

        def loss(batch: DeviceBatch, outputs: Any) -> torch.Tensor:
            nonlocal sums
            losses = self._forward.losses(outputs, batch, training=True)
            sums = add_sums(sums, losses.sums)
            return self._scaled(losses, divisor)

        self._pipelined.train(micro, self._input_of, loss, self._stopwatch.enter)
        return sums

    def _input_of(self, batch: DeviceBatch) -> torch.Tensor:
        return only_one(self._forward.inputs_of(batch))

    def evaluate(self, batch: DeviceBatch) -> Sums:
        sums = zero_sums(self._forward.task.sums)

        def add(part: DeviceBatch, outputs: Any) -> None:
            nonlocal sums
            sums = add_sums(sums, self._forward.losses(outputs, part, training=False).sums)

        self._pipelined.evaluate(split_batch(batch, 2 * self._mesh.pipe.size), self._input_of, add)
        return sums

    def predict(self, batch: DeviceBatch) -> Evaluated:
        what = "only the last rank of a pipeline has its outputs and samples"
        raise UserError(
            what,
            self._config.where("parallel.pipeline"),
            "predict with parallel.pipeline=1, as evaluate does",
        )

    def read_waited(self) -> Waited:
        return self._pipelined.read_waited()

    def last_passes(self) -> list[TimedPass]:
        return self._pipelined.last_passes()

    def under_way(self) -> CurrentPass | None:
        current = self._pipelined.under_way()
        mesh = self._mesh
        if current is None or current.waits_for is None:
            return current
        apart = mesh.world.size // mesh.pipe.size  # distance of the ranks of a pipeline
        return current._replace(
            waits_for=mesh.world.rank + (current.waits_for - mesh.pipe.rank) * apart
        )
