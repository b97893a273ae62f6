"""TorchLoop: torch for a custom loop. Its methods import torch, not this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.frameworks.torch.user_loop.words import WORDS
from hvdtrain.frameworks.user_loop import UserLoop


class TorchLoop(UserLoop):
    """A torch.nn.Module and its optimizer."""

    words = WORDS

    def device(self, config: Config, communicator: Communicator) -> Any:
        """Returns the torch.device of this rank."""
        from hvdtrain.frameworks.torch.device import pick_device as device_of

        return device_of(config, communicator)

    def learner_class(self) -> Callable[..., Any]:
        from hvdtrain.frameworks.torch.user_loop.loop_learner import TorchLoopLearner

        return TorchLoopLearner

    def extra(self) -> Any:
        from hvdtrain.frameworks.torch.user_loop import extra

        return extra


LOOP = TorchLoop()
