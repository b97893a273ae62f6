"""Servers: the arrangement of servers.count, in which some ranks hold the weights and the others learn from samples."""

from __future__ import annotations

import torch

from hvdtrain.frameworks.torch.arrangement import Arrangement
from hvdtrain.frameworks.torch.parallel.parameter_server.role import Role
from hvdtrain.frameworks.torch.parallel.strategy import NamedParameters, Strategy


class Servers(Arrangement):
    """The arrangement of servers.count: some ranks hold the weights, the others learn from samples."""

    def strategy(self, named: NamedParameters, optimizer: torch.optim.Optimizer) -> Strategy:
        return Role(self.making.config, self.making.mesh, named, self.making.stopwatch)
