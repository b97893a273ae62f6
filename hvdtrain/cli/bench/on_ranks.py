"""How a bench runs on all ranks: connected, with one error that ends all, rank 0 speaking."""

from __future__ import annotations

import argparse
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
from hvdtrain.config.yaml_reader import short
from hvdtrain.errors import DONE, UserError, code_of
from hvdtrain.train.build import connect

END_S = 10  # an abort that hangs ends by SIGALRM


class Parser(argparse.ArgumentParser):
    """Its errors are UserErrors."""

    def __init__(self, name: str) -> None:
        super().__init__(prog=f"bench {name}", add_help=False, allow_abbrev=False)
        self.add_argument("--config")
        self.add_argument("--json")

    def error(self, message: str) -> NoReturn:
        raise UserError(message, f"command line of {self.prog}", "python -m hvdtrain bench --help")


def rounds_of(text: str) -> int:
    """A count of 2 or more: quartiles want two values."""
    if not text.isascii() or not text.isdecimal() or not 2 <= int(text[:9]) <= 10**6:
        raise UserError(f"{short(text)} is no number of rounds or steps", "--rounds, --steps", "2 or more")
    return int(text)


def on_ranks(given: tuple[Config, Provenance], work: Callable[[Communicator, str], None]) -> int:
    """work(engine, why it is this one) on every rank; the exit code."""
    check_names(*given)
    communicator, why = connect(*given, placement(os.environ))
    try:
        work(communicator, why)
        communicator.close()
        return DONE
    except BaseException as error:  # a rank that leaves alone would let the others wait
        told = f"hvdtrain: {error}" if isinstance(error, UserError) else traceback.format_exc().rstrip()
        print(f"{told}\nrank {communicator.rank}: the error above ends the bench", file=sys.stderr, flush=True)
        signal.alarm(END_S)
        communicator.abort(error.code if isinstance(error, UserError) else code_of(error))
