"""PowerSgd: the arrangement of comm.compression_rank. Every rank has the whole model."""

from __future__ import annotations

import torch

from hvdtrain.extras.powersgd.keys import PowerSgdKeys
from hvdtrain.extras.powersgd.low_rank import LowRank
from hvdtrain.frameworks.torch.parallel.whole_model import WholeModel
from hvdtrain.frameworks.torch.strategy import NamedParameters, Strategy


class PowerSgd(WholeModel):
    """The arrangement of gradients that are reduced as matrices of low rank."""

    def strategy(self, named: NamedParameters, optimizer: torch.optim.Optimizer) -> Strategy:
        config = self.making.config
        rank = PowerSgdKeys.of(config).compression_rank
        return LowRank(named, self.making.mesh.data, rank, config.seed)
