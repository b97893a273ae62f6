"""RankModel: a rank's part of a torch model, its state by name and its description."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from hvdtrain.comm.mesh import Mesh
from hvdtrain.comm.order import SameOrder, doing_in
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, Piece
from hvdtrain.frameworks.learner import CurrentPass, gather
from hvdtrain.frameworks.torch.device import compile_summary, describe_device
from hvdtrain.frameworks.torch.precision import Precision
from hvdtrain.frameworks.torch.state import LearnerState
from hvdtrain.frameworks.torch.strategy import Strategy


class RankModel:
    """The common part of the trainer's learner and the learner of custom loops."""

    config: Config
    mesh: Mesh
    model: torch.nn.Module
    strategy: Strategy
    device: torch.device
    orders: Sequence[SameOrder]
    _state: LearnerState

    def state(self, *, is_kept: bool = True) -> Arrays:
        return gather(self.mesh.parts, self.pieces(), is_kept=is_kept)

    def pieces(self) -> Iterator[Piece]:
        return self._state.pieces()

    def state_dict_names(self) -> dict[str, str]:
        return self._state.state_dict_names()

    def averaged(self) -> AbstractContextManager[None]:
        return self._state.averaged()

    def weights(self) -> Arrays:
        """Returns copies of the weights (or of their averages, if there are any) and buffers by
        name in the model's state dict.

        A collective if ranks have parts of the weights or of the averages.
        """
        with self.averaged():
            arrays = gather(
                self.mesh.parts,
                (piece for piece in self.pieces() if not piece.name.startswith("s.")),
            )
        return {name: arrays[own] for name, own in self.state_dict_names().items()}

    def under_way(self) -> CurrentPass | None:
        doing = doing_in(self.orders)
        return CurrentPass(doing, None) if doing else None

    def count(self, parameters: Iterable[torch.nn.Parameter]) -> int:
        """Counts the elements of parameters, as in one process."""
        return sum(math.prod(self.strategy.part(p).shape) for p in parameters)

    def how_computed(self, precision: Precision) -> str:
        """Returns for example "fp32 on cpu, no reduction"."""
        device = f"{describe_device(self.device)}{precision.note}"
        compiled = compile_summary(self.config.speed.compile)
        return f"{precision.summary} on {device}{compiled}, {self.strategy.summary}"
