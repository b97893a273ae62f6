"""Gossip: the arrangement of comm.gossip_steps. Every rank has the whole model, and its own weights
between two averages."""

from __future__ import annotations

import torch

from hvdtrain.extras.gossip.keys import GossipKeys
from hvdtrain.extras.gossip.ring import GossipSteps
from hvdtrain.frameworks.torch.parallel.whole_model import (
    WholeModel,
    bucket_bytes_of,
    from_its_begin,
)
from hvdtrain.frameworks.torch.strategy import NamedParameters, Strategy


class Gossip(WholeModel):
    """The arrangement of local steps with gossip."""

    def strategy(self, named: NamedParameters, optimizer: torch.optim.Optimizer) -> Strategy:
        config = self.making.config
        communicator = self.making.mesh.data
        local = GossipSteps(
            named,
            communicator,
            config.comm.local_steps,
            bucket_bytes_of(config, named, communicator),
            self.making.stopwatch,
            GossipKeys.of(config).gossip_steps,
        )
        return from_its_begin(config, named, communicator, local, self.making.stopwatch)
