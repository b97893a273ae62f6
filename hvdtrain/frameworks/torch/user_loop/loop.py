"""TorchLoop: torch for a script's own loop. Its methods import torch, not this module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays
from hvdtrain.frameworks.torch.user_loop.words import WORDS
from hvdtrain.frameworks.user_loop import UserLoop


class TorchLoop(UserLoop):
    """A torch.nn.Module and its optimizer."""

    words = WORDS

    def device(self, config: Config, communicator: Communicator) -> Any:
        """The torch.device of this rank."""
        from hvdtrain.frameworks.torch.device import pick_device as device_of

        return device_of(config, communicator)

    def learner(
        self,
        config: Config,
        mesh: Mesh,
        model: Any,
        optimizer: Any,
        on_step: Callable[[], None],
        example: Any,
    ) -> Any:
        from hvdtrain.frameworks.torch.user_loop.loop_learner import TorchLoopLearner

        return TorchLoopLearner(config, mesh, model, optimizer, on_step, example)

    def to_arrays(self, values: Mapping[str, Any]) -> Arrays:
        from hvdtrain.frameworks.torch.user_loop.extra import to_arrays

        return to_arrays(values)

    def from_arrays(self, arrays: Arrays) -> dict[str, Any]:
        from hvdtrain.frameworks.torch.user_loop.extra import from_arrays

        return from_arrays(arrays)


LOOP = TorchLoop()
