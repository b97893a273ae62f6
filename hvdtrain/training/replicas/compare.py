"""Whether the ranks are still equal: compares digests of weights, buffers, optimizer state, learning rate and step."""

from __future__ import annotations

import struct
from collections import Counter

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.digest import combine, digests
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import Diverged
from hvdtrain.frameworks.learner import Learner

MOST_RANKS = 8  # that a message names


def check_equal(communicator: Communicator, learner: Learner, last: Hyper, hosts: list[str]) -> str:
    """Returns the common digest. Every rank calls it, after sync_buffers(); `last` is of the last step.

    Raises the same Diverged on every rank where one rank differs.
    """
    own = digests(learner.views()) | {"learning rate": _bits(last.lr), "step": last.step}
    combined = combine(own)
    of_all = communicator.allgather(np.array([int(combined, 16)], np.uint64).view(np.int64), "equal")
    if len(set(of_all.tolist())) == 1:
        return combined
    raise explain(communicator.allgather_object(own), hosts, last.step + 1)


def explain(tables: list[dict[str, int]], hosts: list[str], step: int) -> Diverged:
    """Names the first entry that differs, in the order of the model, and the ranks in the minority; tables[rank] has rank's digests."""
    names = list(dict.fromkeys(name for table in tables for name in table))
    different = [name for name in names if len({table.get(name) for table in tables}) > 1]
    name, others = different[0], len(different) - 1
    usual, majority = Counter(table.get(name) for table in tables).most_common(1)[0]
    minority = [rank for rank, table in enumerate(tables) if table.get(name) != usual]
    ranks = ", ".join(f"{rank} on {hosts[rank]}" for rank in minority[:MOST_RANKS])
    if len(minority) > MOST_RANKS:
        ranks += f" and {len(minority) - MOST_RANKS} more"
    where = f"rank{'s' * (len(minority) > 1)} {ranks}, against {majority} equal rank{'s' * (majority > 1)}"
    if 2 * majority <= len(tables):
        where += "; there is no majority, so which of them is wrong is not known"
    fix = (
        "the newest checkpoint is older: start the same command again; if ranks differ again, the cause is that host's memory, or a "
        "model that is not the same on all ranks: its forward depends on a random number, a clock or the rank"
    )
    return Diverged(f"ranks differ after step {step}: {name}{f' and {others} more' if others else ''}", where, fix)


def _bits(number: float) -> int:
    return int.from_bytes(struct.pack(">d", number), "big")
