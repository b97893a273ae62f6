"""Diloco: the arrangement of an outer optimizer. Every rank has the whole model, and its own
weights between two exchanges."""

from __future__ import annotations

import torch

from hvdtrain.errors import UserError
from hvdtrain.extras.diloco.fragments import by_layer, strided
from hvdtrain.extras.diloco.keys import DilocoKeys
from hvdtrain.extras.diloco.outer import OuterOptimizer, OuterSteps
from hvdtrain.frameworks.torch.parallel.whole_model import (
    WholeModel,
    bucket_bytes_of,
    from_its_begin,
)
from hvdtrain.frameworks.torch.strategy import NamedParameters, Strategy


class Diloco(WholeModel):
    """The arrangement of local steps with an outer optimizer."""

    def strategy(self, named: NamedParameters, optimizer: torch.optim.Optimizer) -> Strategy:
        """Raises UserError if the model has fewer layers than fragments."""
        config = self.making.config
        communicator = self.making.mesh.data
        keys = DilocoKeys.of(config)
        layers = by_layer(named)
        if len(layers) < keys.fragments:
            raise UserError(
                f"comm.fragments={keys.fragments} divides the layers of the model, but only "
                f"{len(layers)} of them are trained",
                config.where("comm.fragments"),
                f"comm.fragments={max(1, len(layers))} or fewer",
            )
        local = OuterSteps(
            named,
            communicator,
            config.comm.local_steps,
            bucket_bytes_of(config, named, communicator),
            self.making.stopwatch,
            OuterOptimizer(keys.outer_lr, keys.outer_momentum),
            strided(layers, keys.fragments),
            in_16_bits=keys.differences == "int16",
        )
        return from_its_begin(config, named, communicator, local, self.making.stopwatch)
