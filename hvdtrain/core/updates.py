"""Update: what an asynchronous update of the weights was made from."""

from __future__ import annotations

from typing import NamedTuple


class Update(NamedTuple):
    """One update of the weights from one worker's gradient."""

    ticket: int  # the step whose samples the gradient is of
    staleness: int  # updates between the worker's reading of the weights and this one
    worker: int  # its rank
