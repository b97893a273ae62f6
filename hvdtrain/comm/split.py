"""Which ranks are together in a group, and on a host: what every engine's split() computes before it makes the group."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.placement import Placement

PIECES = 12  # of a list of ranks


class Groups(NamedTuple):
    """What the ranks of a communicator split into, the same on all of them."""

    members: list[list[int]]  # the ranks of each group, ascending; groups in the order of their colors
    hosts: list[int]  # of each rank of the communicator, a number of its host

    def own(self, rank: int) -> list[int] | None:
        """The group of a rank of the communicator; None where it is in none."""
        return next((group for group in self.members if rank in group), None)

    def place(self, rank: int) -> Placement:
        """Placement of a rank of the communicator in its group."""
        group = self.own(rank)
        assert group is not None, rank
        beside = [member for member in group if self.hosts[member] == self.hosts[rank]]
        return Placement(group.index(rank), len(group), beside.index(rank), len(beside), "split")


def split_groups(communicator: Communicator, color: int | None) -> Groups:
    """The groups of equal colors. A collective."""
    table = communicator.allgather_object((color, socket.gethostname(), communicator.local_rank))
    colors = sorted({color for color, _, _ in table if color is not None})
    members = [[rank for rank, (theirs, _, _) in enumerate(table) if theirs == color] for color in colors]
    return Groups(members, number_hosts([(name, local_rank) for _, name, local_rank in table]))


def number_hosts(places: Sequence[tuple[str, int]]) -> list[int]:
    """For each rank the number of its host, in the order of their first ranks; places[rank] is its host's name and its local rank.

    A name with two ranks of one local rank is that of several hosts, as in containers: the second such rank is on the second one.
    """
    seen: Counter[tuple[str, int]] = Counter()
    hosts: dict[tuple[str, int], int] = {}
    numbers = []
    for name, local_rank in places:
        numbers.append(hosts.setdefault((name, seen[name, local_rank]), len(hosts)))
        seen[name, local_rank] += 1
    return numbers


def ranks_summary(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 2-7"; of a very long list its beginning and its length."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    pieces = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    more = f", ... ({len(ranks)} ranks)" if len(pieces) > PIECES else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(pieces[:PIECES])}{more}"
