"""Server: the strategy of a rank that holds a range of the weights, and updates it from the gradients that workers send."""

from __future__ import annotations

from collections.abc import Sequence, Sized

import torch

from hvdtrain.comm.communicator import Communicator, Handle, PointToPoint
from hvdtrain.config.schema import ServersConfig
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Progress
from hvdtrain.core.updates import Update
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.parallel.parameter_server.ranges import Ranges, Weights, broadcast_numbers
from hvdtrain.frameworks.torch.parallel.parameter_server.turns import GRADIENT, WEIGHTS, Turns, end_all
from hvdtrain.frameworks.torch.parallel.strategy import Held, OnePass, Shard, Wrapped, whole_shard
from hvdtrain.frameworks.torch.parallel.zero import of_shards


class Server:
    """In each step: sends weights to the workers whose turn it is, waits for the gradients of the next update, and updates its range.

    The range, its optimizer state and all messages are in host memory. For each worker there is room for the gradient that it will send,
    whose receive waits there before the worker computes it, and a copy of the weights that it got, which the message is sent from while
    other updates are made. With P bytes of weights, S servers and W workers, a server has P + (1 + 2 W) P / S, and the optimizer's state.
    """

    local_mean = True  # of no samples: nothing is asked of the workers
    waits_in_passes = False

    def __init__(
        self, config: ServersConfig, ranges: Ranges, world: PointToPoint, group: Communicator, turns: Turns, stopwatch: Stopwatch
    ) -> None:
        """group: of the servers alone."""
        self._config, self._ranges, self._world, self._group, self._turns = config, ranges, world, group, turns
        self._stopwatch = stopwatch
        self._weights = Weights(ranges)
        self._own = torch.cat([part.cpu() for part in self._weights.parts(world.rank)])
        self._shards = {p: ranges.shard(p, self._own, world.rank) for p in ranges.slots}
        self._inboxes = {worker: _Inbox(self._own, ranges, world, worker) for worker in range(ranges.servers, world.size)}
        self._version = 0  # updates done
        self._staleness = 0  # of the gradient that is applied
        self.equal_ranks = ranges.servers
        self.summary = summary_of(config, world.size)

    def own_steps(self, steps: Sequence[Progress]) -> Sequence[Progress]:
        """All of them: each is an update."""
        self._version = steps[0].step
        self._turns.begin(self._version, steps[-1].step + 1)
        return steps

    def read_updates(self) -> list[Update]:
        return self._turns.read_updates()

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        self.of_wholes = optimizer
        return Wrapped(forward, of_shards(optimizer, self._shards, self.total))

    def shard(self, p: torch.nn.Parameter) -> Shard:
        return self._shards[p]

    def part(self, p: torch.nn.Parameter) -> Shard:
        return whole_shard(p)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Added in the order of ranks, so that a replay has the same bits."""
        if self._group.size == 1:
            return x
        of_all = self._group.allgather(x.reshape(1, -1).contiguous(), f"servers.{x.dtype}.{x.numel()}")
        found = of_all[0].clone()
        for other in of_all[1:]:
            found += other
        return found.view(x.shape)

    def run(self, micro: Sequence[Sized], divisor: int, one_pass: OnePass) -> Sums:
        self._stopwatch.enter("communication")
        for read in self._turns.readers(self._own, self._version):
            self._inboxes[read.worker].send_weights(read.weights, read.version)
        return {}

    @torch.no_grad()
    def reduce(self) -> None:
        chosen = self._turns.chosen()
        gradients = [self._inboxes[worker].gradient() for worker in chosen]
        gradient = gradients[0]
        for other in gradients[1:]:
            gradient += other
        first = self._inboxes[chosen[0]]
        self._staleness = self._version - first.read
        if self._config.correct == "delay_compensation":
            # Zheng et al. 2017, arXiv:1609.08326, eq. 10: g + lambda g g (w - w that the worker had), elementwise
            gradient += self._config.compensation * gradient * gradient * (self._own - first.weights)
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
        self._own.copy_(torch.cat([part.cpu() for part in self._weights.parts(self._world.rank)]))

    @torch.no_grad()
    def sync(self, optimizer: torch.optim.Optimizer) -> None:
        for whole, part in zip(self._weights.parts(self._world.rank), self._ranges.split(self._own, self._world.rank), strict=True):
            whole.copy_(part)
        self._weights.broadcast(self._world)
        broadcast_numbers(self._world, optimizer, [shard.parameter for shard in self._shards.values()])

    def cut_off(self) -> None:
        """After ranks were lost: no message reaches this rank's memory any more."""
        self._turns.cut_off()
        for inbox in self._inboxes.values():
            inbox.cut_off()

    def held(self) -> Held:
        return Held([], [t for inbox in self._inboxes.values() for t in (inbox.weights, inbox.received)])


class _Inbox:
    """What a server and one of the workers send each other."""

    def __init__(self, own: torch.Tensor, ranges: Ranges, world: PointToPoint, worker: int) -> None:
        self._world, self._worker = world, worker
        self.received, self.weights = torch.empty_like(own), own.clone()
        self._received_parts = ranges.split(self.received, world.rank)
        self._weight_parts = ranges.split(self.weights, world.rank)
        self._sending: list[Handle] = []
        self._receiving: list[Handle] = []
        self.read = 0  # the version of the weights that the worker has

    def send_weights(self, weights: torch.Tensor, version: int) -> None:
        """Starts to send them, and to receive the gradient that will be computed at them."""
        self._wait(self._sending)
        self.weights.copy_(weights)
        self.read = version
        for part in self._received_parts:
            self._receiving.append(self._world.start_recv(part, self._worker, "gradient", GRADIENT))
        for part in self._weight_parts:
            self._sending.append(self._world.start_send(part, self._worker, "weights", WEIGHTS))

    def gradient(self) -> torch.Tensor:
        """Waits for all of it."""
        self._wait(self._receiving)
        return self.received

    def cut_off(self) -> None:
        end_all([*self._sending, *self._receiving])

    @staticmethod
    def _wait(handles: list[Handle]) -> None:
        for handle in handles:
            handle.wait()
        handles.clear()


def summary_of(config: ServersConfig, ranks: int) -> str:
    """gradients of 3 workers to 1 server"""
    workers, count = ranks - config.count, config.count
    corrected = "" if config.correct == "none" else f", corrected by {config.correct.replace('_', ' ')}"
    return f"gradients of {workers} worker{'s' * (workers > 1)} to {count} server{'s' * (count > 1)}{corrected}"
