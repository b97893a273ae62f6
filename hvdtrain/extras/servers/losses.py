"""Deaths of workers between two sync points: the state of each living rank, and how the others
continue."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Communicator, Interruptible
from hvdtrain.core.progress import GoOn, Outstanding


class RankSyncPoint:
    """The sync point that a rank has reached or passed, known by the steps done there."""

    def __init__(self) -> None:
        self._begun: int | None = (
            None  # of the steps that this rank makes now, or made last, the first
        )
        self._synced: int | None = None  # the same, once all ranks have the weights behind them

    def begin(self, first: int) -> int:
        self._begun = first
        self._synced = None
        return first

    def synced(self) -> None:
        self._synced = self._begun

    def is_begun(self, kept: int) -> bool:
        """Whether steps after this sync point have begun."""
        return self._begun == kept

    def is_behind(self, kept: int) -> bool:
        """Whether this rank has reached the next sync point, with weights that all servers
        agree on."""
        return self._synced == kept


class SurvivorReport(NamedTuple):
    """The state that a living rank reports after a death."""

    rank: int  # before the loss
    version: int | None = None  # of a server: updates done
    outstanding: dict[int, Outstanding] | None = None  # of the first server, by workers
    held: int | None = None  # of a worker: the ticket of the gradient that it has whole


def go_on_from(reports: Sequence[SurvivorReport | None], servers: int) -> GoOn | None:
    """Returns how the living ranks continue; None unless all servers and a worker are left, at the
    same sync point. reports: of the living ranks, in order.

    A worker has a gradient until it computes the next one, which is after all servers have made an
    update from it. So it is sent again if the first server has it as outstanding, and all servers
    sent the same version of its weights.
    """
    living = [report for report in reports if report is not None]
    of_servers = [report for report in living if report.rank < servers]
    if len(living) < len(reports) or len(of_servers) < servers or len(living) == servers:
        return None
    versions = {report.version for report in of_servers}
    assert len(versions) == 1, f"servers have made different updates: {reports}"
    version = of_servers[0].version
    outstanding = of_servers[0].outstanding or {}
    assert version is not None, reports
    ranks = {report.rank: now for now, report in enumerate(living)}
    holders = {report.rank: report.held for report in living if report.held is not None}
    kept = {
        worker: read for worker, read in outstanding.items() if holders.get(worker) == read.ticket
    }
    again = sorted(read.ticket for worker, read in outstanding.items() if worker not in kept)
    sent_again = {ranks[worker]: read for worker, read in kept.items()}
    return GoOn(version, ranks, sent_again, again, source="servers")


class LostMeanwhile(Exception):
    """Raised when another server lacks messages of the next update because a rank died."""


class ServerAgreement:
    """The agreement of this server with the others, whose group no worker is in: its collectives go
    on when a worker is lost.

    An update is made of messages of workers first, then of collectives of the group alone. Between
    them the servers agree that each has what it needs. So all have made the same updates whenever a
    worker is lost, and each of them as a whole.
    """

    def __init__(self, world: Interruptible, group: Communicator) -> None:
        self._world = world
        self._group = group

    def of_group(self, group: Communicator) -> ServerAgreement:
        """These servers after a loss."""
        return ServerAgreement(self._world, group)

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """A context around the messages of one update: it returns on all servers or raises on all.
        Every server enters it equally often."""
        try:
            yield
        except Exception as error:
            if self._world.is_loss(error):
                # another server may wait for a worker that waits for this one
                self._world.interrupt()
                with contextlib.suppress(
                    Exception
                ):  # that it fails says the same: another server has gone on to shrink()
                    self._is_ready(False)
            raise
        if not self._is_ready(True):
            self._world.interrupt()
            raise LostMeanwhile

    def meet(self) -> None:
        """Waits until no server is in an update, or raises on all servers."""
        with self.all_or_none():
            pass

    def _is_ready(self, is_ready: bool) -> bool:
        """Whether all servers are. Where a server sees it fail, none has come to its end with
        yes."""
        not_ready = self._group.allreduce(np.array([not is_ready], np.int64), "servers.ready")
        return not not_ready[0]
