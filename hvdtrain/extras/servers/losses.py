"""Deaths of workers between two sync points: the state of each living rank, and how they
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
            None  # the first of the steps that this rank makes now, or made last
        )
        self._synced: int | None = None  # the same, after all ranks have the resulting weights

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
    version: int | None = None  # on a server: updates done
    outstanding: dict[int, Outstanding] | None = None  # on the first server, by worker
    held: int | None = None  # on a worker: the ticket of its complete gradient


def go_on_from(reports: Sequence[SurvivorReport | None], servers: int) -> GoOn | None:
    """Returns how the living ranks continue; None unless all servers and a worker are left at the
    same sync point. reports: from the living ranks, in order.

    A worker keeps a gradient until it computes the next one, which is after all servers have made
    an update from it. So it is sent again if it is outstanding on the first server and all servers
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
    """The agreement of this server with the others. Their group contains no worker, so its
    collectives still work when a worker dies.

    An update first uses messages of workers, then only collectives of the group. In between, the
    servers agree that each has all messages. So all servers have made the same complete updates
    whenever a worker dies.
    """

    def __init__(self, world: Interruptible, group: Communicator) -> None:
        self._world = world
        self._group = group

    def of_group(self, group: Communicator) -> ServerAgreement:
        """Returns these servers after a loss."""
        return ServerAgreement(self._world, group)

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """A context for the messages of one update, which exits normally on all servers or raises
        on all. Every server enters it equally often."""
        try:
            yield
        except Exception as error:
            if self._world.is_loss(error):
                # another server may wait for a worker that waits for this one
                self._world.interrupt()
                with contextlib.suppress(
                    Exception
                ):  # a failure has the same meaning: another server has continued to shrink()
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
        """Whether all servers are ready. If it fails on one server, it returns true on none."""
        not_ready = self._group.allreduce(np.array([not is_ready], np.int64), "servers.ready")
        return not not_ready[0]
