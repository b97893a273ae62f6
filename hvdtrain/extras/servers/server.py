"""Server: the strategy of a rank that holds a range of the weights, and updates it from the
gradients that workers send."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from contextlib import nullcontext

import torch

from hvdtrain.comm.communicator import Communicator, Handle, PointToPoint
from hvdtrain.comm.mesh import Mesh
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import GoOn, Progress, WorkerUpdate
from hvdtrain.extras.servers.keys import ServersConfig
from hvdtrain.extras.servers.losses import RankSyncPoint, ServerAgreement, SurvivorReport
from hvdtrain.extras.servers.ranges import (
    Ranges,
    Weights,
    broadcast_numbers,
)
from hvdtrain.extras.servers.turns import (
    GRADIENT,
    WEIGHTS,
    AsynchronousTurns,
    Turns,
    end_all,
)
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.parallel.zero_1_and_2 import of_shards
from hvdtrain.frameworks.torch.strategy import OnePass, Shard, Strategy, StrategyMemory, Wrapped


class Server(Strategy):
    """In each step: sends weights to the workers whose turn it is, waits for the gradients of the
    next update, and updates its range.

    The range, its optimizer state and all messages are in host memory. For each worker there is a
    buffer for its next gradient, whose receive is posted before the worker computes it. There is
    also a copy of the weights that the worker got, from which the message is sent while other
    updates are made. With P bytes of weights, S servers and W workers, a server holds P + (1 + 2 W)
    P / S, and the optimizer's state.
    """

    local_mean = True  # without samples, no collective with the workers is needed

    def __init__(
        self,
        config: ServersConfig,
        ranges: Ranges,
        world: PointToPoint,
        group: Communicator,
        turns: Turns,
        stopwatch: Stopwatch,
        agreement: ServerAgreement | None = None,
    ) -> None:
        """group: only the servers. agreement: between several servers that continue when a worker
        dies."""
        self._config = config
        self._ranges = ranges
        self._world = world
        self._group = group
        self._turns = turns
        self._stopwatch = stopwatch
        self._agreement = agreement
        self._weights = Weights(ranges)
        self._own = torch.cat([part.cpu() for part in self._weights.parts_of_server(world.rank)])
        self._shards = {p: ranges.shard(p, self._own, world.rank) for p in ranges.slots}
        self._inboxes = {
            worker: _Inbox(self._own, ranges, world, worker)
            for worker in range(ranges.servers, world.size)
        }
        self._sync_points = RankSyncPoint()
        self._version = 0  # updates done
        self._goes_on = False  # at that version
        self._sent_again: list[
            _Inbox
        ] = []  # workers whose gradients arrive without another read of the weights
        self._chosen: Sequence[int] = []  # the workers whose gradients the next update uses
        self._staleness = 0  # staleness of the applied gradient
        self.summary = summary_of(config, world.size)

    @property
    def equal_ranks(self) -> int:
        return self._ranges.servers

    def own_steps(self, steps: Sequence[Progress]) -> Sequence[Progress]:
        """Returns all steps, because each is an update; after the loss of a worker, the remaining
        ones."""
        first = self._sync_points.begin(steps[0].step)
        if not self._goes_on:
            self._version = first
        self._goes_on = False
        self._turns.begin(first, steps[-1].step + 1)
        for inbox in self._sent_again:
            inbox.receive()
        self._sent_again = []
        return steps[self._version - first :]

    def read_updates(self) -> list[WorkerUpdate]:
        return self._turns.read_updates()

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        return Wrapped(forward, of_shards(optimizer, self._shards, self.total))

    def shard(self, p: torch.nn.Parameter) -> Shard:
        return self._shards[p]

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over servers, added in rank order so that a replay has the same bits."""
        if self._group.size == 1:
            return x
        of_all = self._group.allgather(
            x.reshape(1, -1).contiguous(), f"servers.{x.dtype}.{x.numel()}"
        )
        found = of_all[0].clone()
        for other in of_all[1:]:
            found += other
        return found.view(x.shape)

    def run(self, micro: Sequence[Sized], divisor: float, one_pass: OnePass) -> Sums:
        self._stopwatch.enter("communication")
        with self._agreement.all_or_none() if self._agreement else nullcontext():
            for read in self._turns.readers(self._own, self._version):
                self._inboxes[read.worker].send_weights(read.weights, read.version)
            self._chosen = self._turns.chosen()
            for worker in self._chosen:
                self._inboxes[worker].wait()
        return {}

    @torch.no_grad()
    def reduce(self) -> None:
        first, *others = [self._inboxes[worker] for worker in self._chosen]
        gradient = first.received
        for other in others:
            gradient += other.received
        self._staleness = self._version - first.read
        if self._config.correct == "delay_compensation":
            # Zheng et al. 2017, arXiv:1609.08326, eq. 10: g + lambda g g (w - w that the worker
            # had), elementwise
            gradient += (
                self._config.compensation * gradient * gradient * (self._own - first.weights)
            )
        self._version += 1
        for shard in self._shards.values():
            updated = shard.parameter
            begin = updated.storage_offset()  # in self._own
            updated.grad = gradient[begin : begin + updated.numel()]

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._config.correct == "scale":  # Zhang et al. 2016, arXiv:1511.05950, eq. 8
            for group in optimizer.param_groups:
                group["lr"] /= max(1, self._staleness)
        optimizer.step()

    @torch.no_grad()
    def weights_changed(self) -> None:
        self._own.copy_(
            torch.cat([part.cpu() for part in self._weights.parts_of_server(self._world.rank)])
        )

    @torch.no_grad()
    def sync(self, optimizer: torch.optim.Optimizer) -> None:
        if self._agreement:
            self._agreement.meet()
        for whole, part in zip(
            self._weights.parts_of_server(self._world.rank),
            self._ranges.split(self._own, self._world.rank),
            strict=True,
        ):
            whole.copy_(part)
        self._weights.broadcast(self._world)
        broadcast_numbers(
            self._world, optimizer, [shard.parameter for shard in self._shards.values()]
        )
        self._sync_points.synced()

    def cut_off(self) -> None:
        """Called after ranks died; from then on, no message writes to this rank's memory."""
        self._turns.cut_off()
        for inbox in self._inboxes.values():
            inbox.cut_off()

    def report(self, rank: int, kept: int) -> SurvivorReport | None:
        if not isinstance(self._turns, AsynchronousTurns) or self._sync_points.is_behind(kept):
            return None
        if not self._sync_points.is_begun(kept):
            return SurvivorReport(rank, kept)
        return SurvivorReport(
            rank, self._version, outstanding=self._turns.outstanding(self._version)
        )

    def go_on(self, how: GoOn, kept: int, mesh: Mesh) -> None:
        assert isinstance(self._turns, AsynchronousTurns)
        workers = range(self._ranges.servers, self._world.size)
        self._turns.go_on(how, workers, is_begun=self._sync_points.is_begun(kept))
        self._inboxes = {
            now: self._inboxes[former].of_worker(now)
            for former, now in how.ranks.items()
            if former in self._inboxes
        }
        self._sent_again = [self._inboxes[worker] for worker in how.sent_again]
        self._version = how.version
        self._goes_on = True
        self._group = mesh.role
        if self._agreement:
            self._agreement = self._agreement.of_group(mesh.role)
        self.summary = summary_of(self._config, self._world.size)

    def held(self) -> StrategyMemory:
        return StrategyMemory(
            [], [t for inbox in self._inboxes.values() for t in (inbox.weights, inbox.received)]
        )


class _Inbox:
    """The messages between a server and one worker."""

    def __init__(self, own: torch.Tensor, ranges: Ranges, world: PointToPoint, worker: int) -> None:
        self._world = world
        self._worker = worker
        self.received = torch.empty_like(own)
        self.weights = own.clone()
        self._received_parts = ranges.split(self.received, world.rank)
        self._weight_parts = ranges.split(self.weights, world.rank)
        self._sending: list[Handle] = []
        self._receiving: list[Handle] = []
        self.read = 0  # the version of the weights that the worker has

    def of_worker(self, worker: int) -> _Inbox:
        """Returns itself. The worker has this number now, and pending messages will not arrive."""
        self._worker = worker
        self._sending = []
        self._receiving = []
        return self

    def send_weights(self, weights: torch.Tensor, version: int) -> None:
        """Starts to send them, and to receive the gradient that will be computed at them."""
        self._wait(self._sending)
        self.weights.copy_(weights)
        self.read = version
        self.receive()
        for part in self._weight_parts:
            self._sending.append(self._world.start_send(part, self._worker, "weights", WEIGHTS))

    def receive(self) -> None:
        """Starts to receive a gradient."""
        for part in self._received_parts:
            self._receiving.append(self._world.start_recv(part, self._worker, "gradient", GRADIENT))

    def wait(self) -> None:
        """Waits until the whole gradient has arrived."""
        self._wait(self._receiving)

    def cut_off(self) -> None:
        end_all([*self._sending, *self._receiving])

    @staticmethod
    def _wait(handles: list[Handle]) -> None:
        for handle in handles:
            handle.wait()
        handles.clear()


def summary_of(config: ServersConfig, ranks: int) -> str:
    """Formats the summary: gradients of 3 workers to 1 server."""
    workers = ranks - config.count
    count = config.count
    corrected = (
        "" if config.correct == "none" else f", corrected by {config.correct.replace('_', ' ')}"
    )
    return (
        f"gradients of {workers} worker{'s' if workers > 1 else ''} to {count} "
        f"server{'s' if count > 1 else ''}{corrected}"
    )
