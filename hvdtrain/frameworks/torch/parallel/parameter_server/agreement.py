"""Agreement of the servers: where they outlive a worker, an update is made by all of them or by none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from hvdtrain.comm.communicator import Communicator, Interruptible


class LostMeanwhile(Exception):
    """Another server does not have what the next update needs: a rank is lost."""


class Agreement:
    """Agreement of this server with the others, whose group no worker is in: its collectives go on when a worker is lost.

    An update is made of messages of workers first, then of collectives of the group alone. Between them the servers agree that each has
    what it needs. So all have made the same updates whenever a worker is lost, and each of them as a whole.
    """

    def __init__(self, world: Interruptible, group: Communicator) -> None:
        self._world, self._group = world, group

    def of_group(self, group: Communicator) -> Agreement:
        """The agreement of these servers after a loss."""
        return Agreement(self._world, group)

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Around the messages of one update: returns on all servers, or raises on all. Every server comes here equally often."""
        try:
            yield
        except Exception as error:
            if self._world.is_loss(error):
                self._world.interrupt()  # another server may wait for a worker that waits for this one
                with contextlib.suppress(Exception):  # that it fails says the same: another server has gone on to shrink()
                    self._is_ready(False)
            raise
        if not self._is_ready(True):
            self._world.interrupt()
            raise LostMeanwhile

    def meet(self) -> None:
        """Returns once no server is in an update, or raises on all."""
        with self.all_or_none():
            pass

    def _is_ready(self, is_ready: bool) -> bool:
        """Whether all servers are. Where a server sees it fail, none has come to its end with yes."""
        not_ready = self._group.allreduce(np.array([not is_ready], np.int64), "servers.ready")
        return not not_ready[0]
