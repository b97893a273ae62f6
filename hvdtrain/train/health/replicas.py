"""Whether the ranks are still equal: digests of their weights, buffers, slots, rate and step, compared."""

from __future__ import annotations

import struct
from collections import Counter

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.digest import combine, digests
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import Diverged
from hvdtrain.frameworks.learner import Learner


def check_equal(communicator: Communicator, learner: Learner, last: Hyper, hosts: list[str]) -> str:
    """The common digest; raises the same Diverged on every rank where one differs. Every rank calls it, where statistics are settled."""
    mine = digests(learner.views()) | {"learning rate": _bits(last.lr), "step": last.step}
    whole = combine(mine)
    everyone = communicator.allgather(np.array([int(whole, 16)], np.uint64).view(np.int64), "equal")
    if len(set(everyone.tolist())) == 1:
        return whole
    raise Diverged(*explain(communicator.allgather_object(mine), hosts, last.step + 1))


def explain(tables: list[dict[str, int]], hosts: list[str], step: int) -> tuple[str, str, str]:
    """(what, where, fix) of the first thing that differs, in the order of the model; the ranks in the minority are the odd ones."""
    names = list(dict.fromkeys(name for table in tables for name in table))
    name = next(name for name in names if len({table.get(name) for table in tables}) > 1)
    count = sum(len({table.get(other) for table in tables}) > 1 for other in names)
    usual, most = Counter(table.get(name) for table in tables).most_common(1)[0]
    odd = [rank for rank, table in enumerate(tables) if table.get(name) != usual]
    named = ", ".join(f"{rank} on {hosts[rank]}" for rank in odd[:8]) + (f" and {len(odd) - 8} more" if len(odd) > 8 else "")
    what = f"ranks differ after step {step}: {name}{f' and {count - 1} more' if count > 1 else ''}"
    where = f"rank{'s' * (len(odd) > 1)} {named}, against {most} equal rank{'s' * (most > 1)}"
    where += "; which of them is wrong cannot be told" * (2 * most <= len(tables))
    fix = (
        "the newest checkpoint is older: start the same command again; if it comes back, that host's memory or a model that is not the same"
    )
    return what, where, f"{fix} on all ranks (a random number, a clock, a rank in its forward) is the cause"


def _bits(number: float) -> int:
    return int.from_bytes(struct.pack(">d", number), "big")
