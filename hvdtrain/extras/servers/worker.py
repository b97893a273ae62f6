"""Worker: the strategy of a rank that fetches weights from the servers, and sends them
gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized

import numpy as np
import torch

from hvdtrain.comm.communicator import Handle, PointToPoint
from hvdtrain.comm.mesh import Mesh
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import GoOn, Progress
from hvdtrain.extras.servers.keys import ServersConfig
from hvdtrain.extras.servers.losses import RankSyncPoint, SurvivorReport
from hvdtrain.extras.servers.ranges import (
    Ranges,
    Weights,
    broadcast_numbers,
)
from hvdtrain.extras.servers.server import summary_of
from hvdtrain.extras.servers.turns import (
    DONE,
    GRADIENT,
    LEADER,
    NO_TICKET,
    TICKET,
    WEIGHTS,
    end_all,
)
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.parallel.buckets import Bucket, InOrder
from hvdtrain.frameworks.torch.parallel.zero_1_and_2 import of_shards
from hvdtrain.frameworks.torch.strategy import (
    OnePass,
    Shard,
    Strategy,
    Wrapped,
    run_passes,
)


class Worker(Strategy):
    """In each step that it gets: waits for weights, and sends each bucket of gradients as soon as
    backward has computed it.

    The weights arrive while the samples are read, and a gradient may still be in transit then. The
    worker updates nothing: it has 0 elements of the training state besides the weights, which are
    from its last step until a sync point broadcasts the newest.

    If a message fails during a pass, the pass is completed first, because its gradient may be sent
    again.
    """

    def __init__(
        self, config: ServersConfig, ranges: Ranges, world: PointToPoint, stopwatch: Stopwatch
    ) -> None:
        self._config = config
        self._ranges = ranges
        self._world = world
        self._stopwatch = stopwatch
        self._weights = Weights(ranges)
        self._buckets = [
            _ServerBucket(i, parameters, ranges, world)
            for i, parameters in enumerate(ranges.buckets)
        ]
        self._order = InOrder(self._buckets, self._start, stopwatch)
        self._shards = {
            p: Shard(torch.nn.Parameter(p.detach().reshape(-1)[:0].cpu()), p, 0, 0)
            for p in ranges.slots
        }
        self._parts = [
            (server, part)
            for server in range(ranges.servers)
            for part in self._weights.parts_of_server(server)
        ]
        self._arriving: list[tuple[Handle, torch.Tensor]] = []
        self._done: Handle | None = None
        self._ticket: Handle | None = None
        self._sync_points = RankSyncPoint()
        self._made = 0  # the current or last step
        self._held: int | None = None  # the same, after the buckets contain its complete gradient
        self._sends_again = False
        self._failure: Exception | None = None  # failure of a message in this step
        self.summary = summary_of(config, world.size)

    @property
    def equal_ranks(self) -> int:
        return self._ranges.servers

    def own_steps(self, steps: Sequence[Progress]) -> Iterator[Progress]:
        """Yields steps of the tickets that the first server assigns; all steps with
        servers.bound=0."""
        first = self._sync_points.begin(steps[0].step)
        self._begin()
        for ticket in (
            self._tickets() if self._config.is_asynchronous else range(first, steps[-1].step + 1)
        ):
            self._made = ticket
            self._fetch()
            yield steps[ticket - first]
            if self._failure:
                raise self._failure

    def _begin(self) -> None:
        if self._sends_again:
            for bucket in self._buckets:
                bucket.send()
            self._say_done()
        else:
            self._held = None
        self._sends_again = False

    def _tickets(self) -> Iterator[int]:
        message = np.empty(1, np.int64)
        while True:
            self._ticket = self._world.start_recv(message, LEADER, "ticket", TICKET)
            self._ticket.wait()
            if message[0] == NO_TICKET:
                return
            yield int(message[0])

    def _fetch(self) -> None:
        """Starts to receive weights."""
        for server, part in self._parts:
            host = part if part.device.type == "cpu" else torch.empty(part.shape, dtype=part.dtype)
            self._arriving.append((self._world.start_recv(host, server, "weights", WEIGHTS), part))

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        return Wrapped(forward, of_shards(optimizer, self._shards, self.total))

    def shard(self, p: torch.nn.Parameter) -> Shard:
        return self._shards[p]

    @torch.no_grad()
    def _finish_fetching(self) -> None:
        for handle, part in self._arriving:
            found = handle.wait()
            if found is not part:
                part.copy_(found)
        self._arriving = []

    def run(self, micro: Sequence[Sized], divisor: float, one_pass: OnePass) -> Sums:
        self._stopwatch.enter("communication")
        self._finish_fetching()
        for bucket in self._buckets:
            bucket.finish()
        self._held = None  # the buckets are filled again; all servers have applied its update
        return run_passes(micro, divisor, one_pass, before_last=self._order.begin)

    def reduce(self) -> None:
        self._order.end()
        self._held = self._made
        if self._config.is_asynchronous:
            self._unless_failed(self._say_done)
        for shard in self._shards.values():
            shard.parameter.grad = torch.zeros_like(shard.parameter)

    def _say_done(self) -> None:
        if self._done:
            self._done.wait()
        self._done = self._world.start_send(np.zeros(1, np.int64), LEADER, "done", DONE)

    def _start(self, bucket: _ServerBucket) -> None:
        bucket.fill()
        self._unless_failed(bucket.send)

    def _unless_failed(self, send: Callable[[], None]) -> None:
        if self._failure:
            return
        try:
            send()
        except Exception as error:
            self._failure = error  # own_steps() raises it

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def weights_changed(self) -> None:
        pass

    def sync(self, optimizer: torch.optim.Optimizer) -> None:
        for bucket in self._buckets:
            bucket.finish()
        self._weights.broadcast(self._world)
        broadcast_numbers(
            self._world, optimizer, [shard.parameter for shard in self._shards.values()]
        )
        self._sync_points.synced()

    def cut_off(self) -> None:
        """Called after ranks died; from then on, no message writes to this rank's memory."""
        self._order.cut_off()
        end_all([handle for handle, _ in self._arriving])
        end_all([*([self._done] if self._done else []), *([self._ticket] if self._ticket else [])])
        for bucket in self._buckets:
            bucket.cut_off()
        for p in self._shards:
            p.grad = None  # from an unfinished pass

    def report(self, rank: int, kept: int) -> SurvivorReport | None:
        if not self._config.is_asynchronous or self._sync_points.is_behind(kept):
            return None
        return SurvivorReport(rank, held=self._held if self._sync_points.is_begun(kept) else None)

    def go_on(self, how: GoOn, kept: int, mesh: Mesh) -> None:
        self._sends_again = self._world.rank in how.sent_again
        self._arriving = []
        self._done = None
        self._ticket = None
        self._failure = None
        for bucket in self._buckets:
            bucket.forget_all()
        self.summary = summary_of(self._config, self._world.size)


class _ServerBucket(Bucket):
    """A bucket from whose buffer each server's part is sent."""

    def __init__(
        self, number: int, parameters: list[torch.nn.Parameter], ranges: Ranges, world: PointToPoint
    ) -> None:
        super().__init__(parameters, {p: ranges.slots[p].begin for p in parameters})
        self._world = world
        self._flat = torch.zeros(ranges.lengths[number], dtype=parameters[0].dtype)
        self._parts = [self._flat[ranges.part(number, server)] for server in range(ranges.servers)]
        self._sending: list[Handle] = []

    def empty(self) -> torch.Tensor:
        self.finish()
        return self._flat

    def send(self) -> None:
        """Starts to send it."""
        self._sending = [
            self._world.start_send(part, server, "gradient", GRADIENT)
            for server, part in enumerate(self._parts)
        ]

    def cut_off(self) -> None:
        end_all(self._sending)

    def forget_all(self) -> None:
        """Discards pending messages and the gradients of an incomplete pass."""
        self._sending = []
        self.forget()

    def finish(self) -> None:
        """Waits until the last gradient is sent."""
        for handle in self._sending:
            handle.wait()
        self._sending = []
