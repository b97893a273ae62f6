"""Whether a job lives on where a rank is lost (guard.lost), so that its launcher must not end the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hvdtrain.config.read import read_argument, read_file
from hvdtrain.errors import UserError

_KEY = "guard.lost"


def outlives_ranks(job: Sequence[str]) -> bool:
    """By the arguments of the job and the file of its --config; not for a script, which may call hvdtrain.train() with anything."""
    value: object = "stop"
    for path in _config_files(job):
        try:
            value = next((assigned.value for assigned in read_file(path) if assigned.key == _KEY), value)
        except UserError:  # the job says it
            continue
    for argument in job:
        if argument.removeprefix("--").startswith(f"{_KEY}="):
            value = read_argument(argument).value
    return value in ("shrink", "restart")


def _config_files(job: Sequence[str]) -> list[str]:
    after = [following for argument, following in pairwise(job) if argument == "--config"]
    return after + [argument.partition("=")[2] for argument in job if argument.startswith("--config=")]
