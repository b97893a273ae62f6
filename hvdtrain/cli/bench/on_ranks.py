"""How a bench runs on all ranks: they connect, do the work, and end together where one of them fails."""

from __future__ import annotations

import os
from collections.abc import Callable

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.placement import placement
from hvdtrain.config.plugins import check_names
from hvdtrain.config.schema import Config
from hvdtrain.errors import DONE
from hvdtrain.training.build import connect
from hvdtrain.training.failure import end_every_rank


def run_on_ranks(config: Config, work: Callable[[Communicator, str], None]) -> int:
    """work(communicator, why this engine was chosen) on every rank; returns the exit code."""
    check_names(config)
    communicator, engine_reason = connect(config, placement(os.environ))
    try:
        work(communicator, engine_reason)
        communicator.close()
        return DONE
    except BaseException as error:  # SystemExit too
        return end_every_rank(error, communicator, "bench")
