"""How a bench runs on all ranks: they connect, do the work, and end together where one of them fails."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.placement import placement
from hvdtrain.config.plugins import check_names
from hvdtrain.config.read import Provenance
from hvdtrain.config.schema import Config
from hvdtrain.errors import DONE, UserError, exit_code_of
from hvdtrain.train.build import connect

END_S = 10  # an abort that hangs is ended by SIGALRM


def run_on_ranks(config: Config, provenance: Provenance, work: Callable[[Communicator, str], None]) -> int:
    """work(communicator, why this engine was chosen) on every rank; returns the exit code."""
    check_names(config)
    communicator, engine_reason = connect(config, provenance, placement(os.environ))
    try:
        work(communicator, engine_reason)
        communicator.close()
        return DONE
    except BaseException as error:  # a rank that left alone would let the others wait
        _end_all_ranks(communicator, error)


def _end_all_ranks(communicator: Communicator, error: BaseException) -> NoReturn:
    message = f"hvdtrain: {error}" if isinstance(error, UserError) else traceback.format_exc().rstrip()
    print(f"{message}\nrank {communicator.rank}: the error above ends the bench", file=sys.stderr, flush=True)
    signal.alarm(END_S)
    communicator.abort(exit_code_of(error))
