"""NoiseMeter: the measurements of gradients for log.noise_scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper
from hvdtrain.extras.noise_scale.scale import noise_sums
from hvdtrain.frameworks.torch.step import StepAddition, Total
from hvdtrain.frameworks.torch.strategy import Shard


class NoiseMeter(StepAddition):
    """Measures the squared norms for the gradient noise scale, without another
    pass over the data.

    Construct it before the strategy, so that its hooks see the local gradient before the strategy's
    hooks reduce it.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], world: Communicator) -> None:
        self._world = world
        self._is_last_pass = False
        # squared norm of this rank's local gradient
        self._local_square = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
        for p in parameters:
            p.register_post_accumulate_grad_hook(self._add)

    def last_pass(self) -> None:
        """Announces that the next backward completes the gradients of all the rank's samples of the
        step."""
        self._is_last_pass = True
        self._local_square.zero_()

    def read(self, hyper: Hyper, count: int, shards: Sequence[Shard], total: Total) -> Sums:
        """Returns this rank's part of NOISE_SCALE_KEYS for `count` samples, as device scalars."""
        self._is_last_pass = False
        square = total(sum((_square(shard.parameter) for shard in shards), torch.zeros(())))
        # with shard.offload it is in host memory
        global_square = square.to(self._local_square.device)
        return noise_sums(self._local_square, global_square, count, hyper.batch, self._world.size)

    def _add(self, p: torch.Tensor) -> None:
        if self._is_last_pass:
            self._local_square += _square(p)


def addition(
    config: Config, mesh: Mesh, model: torch.nn.Module, parameters: list[torch.nn.Parameter]
) -> NoiseMeter:
    """Creates it for the trained parameters."""
    return NoiseMeter(parameters, mesh.world)


def _square(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad.square().sum(dtype=torch.float64)
