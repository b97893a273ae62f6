"""Worker: the strategy of a rank that fetches weights from the servers, and sends them gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized

import numpy as np
import torch

from hvdtrain.comm.communicator import Handle, PointToPoint
from hvdtrain.config.schema import ServersConfig
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Progress
from hvdtrain.core.updates import Update
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.parallel.buckets import InOrder
from hvdtrain.frameworks.torch.parallel.parameter_server.ranges import Ranges, Weights, broadcast_numbers
from hvdtrain.frameworks.torch.parallel.parameter_server.server import summary_of
from hvdtrain.frameworks.torch.parallel.parameter_server.turns import DONE, GRADIENT, LEADER, NO_TICKET, TICKET, WEIGHTS, end_all
from hvdtrain.frameworks.torch.parallel.strategy import OnePass, Shard, Wrapped, run_passes, whole_shard
from hvdtrain.frameworks.torch.parallel.zero import of_shards


class Worker:
    """In each step that it gets: waits for weights, and sends each bucket of gradients as soon as backward has computed it.

    The weights arrive while the samples are read, and a gradient may still be under way then. The worker updates nothing: it has 0
    elements of the training state beside the weights, which are those of the last step that it made until a sync point gives all ranks
    the newest.
    """

    local_mean = False
    waits_in_passes = False

    def __init__(self, config: ServersConfig, ranges: Ranges, world: PointToPoint, stopwatch: Stopwatch) -> None:
        self._config, self._ranges, self._world, self._stopwatch = config, ranges, world, stopwatch
        self._weights = Weights(ranges)
        self._buckets = [_Bucket(i, parameters, ranges, world) for i, parameters in enumerate(ranges.buckets)]
        self._order = InOrder(self._buckets, _Bucket.start, stopwatch)
        self._shards = {p: Shard(torch.nn.Parameter(p.detach().reshape(-1)[:0].cpu()), p, 0, 0) for p in ranges.slots}
        self._parts = [(server, part) for server in range(ranges.servers) for part in self._weights.parts(server)]
        self._arriving: list[tuple[Handle, torch.Tensor]] = []
        self._done: Handle | None = None
        self._ticket: Handle | None = None
        self.equal_ranks = ranges.servers
        self.summary = summary_of(config, world.size)

    def own_steps(self, steps: Sequence[Progress]) -> Iterator[Progress]:
        """Those of the tickets that the first server gives; all of them with servers.bound=0."""
        tickets = self._tickets() if self._config.are_asynchronous else range(steps[0].step, steps[-1].step + 1)
        for ticket in tickets:
            self._fetch()
            yield steps[ticket - steps[0].step]

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

    def read_updates(self) -> list[Update]:
        return []

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        self.of_wholes = optimizer
        return Wrapped(forward, of_shards(optimizer, self._shards, self.total))

    def shard(self, p: torch.nn.Parameter) -> Shard:
        return self._shards[p]

    def part(self, p: torch.nn.Parameter) -> Shard:
        return whole_shard(p)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @torch.no_grad()
    def _finish_fetching(self) -> None:
        for handle, part in self._arriving:
            found = handle.wait()
            if found is not part:
                part.copy_(found)
        self._arriving = []

    def run(self, micro: Sequence[Sized], divisor: int, one_pass: OnePass) -> Sums:
        self._stopwatch.enter("communication")
        self._finish_fetching()
        return run_passes(micro, divisor, one_pass, before_last=self._order.begin)

    def reduce(self) -> None:
        self._order.end()
        if self._config.are_asynchronous:
            if self._done:
                self._done.wait()
            self._done = self._world.start_send(np.zeros(1, np.int64), LEADER, "done", DONE)
        for shard in self._shards.values():
            shard.parameter.grad = torch.zeros_like(shard.parameter)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def weights_changed(self) -> None:
        pass

    def sync(self, optimizer: torch.optim.Optimizer) -> None:
        for bucket in self._buckets:
            bucket.finish()
        self._weights.broadcast(self._world)
        broadcast_numbers(self._world, optimizer, [shard.parameter for shard in self._shards.values()])

    def cut_off(self) -> None:
        """After ranks were lost: no message reaches this rank's memory any more."""
        self._order.cut_off()
        end_all([handle for handle, _ in self._arriving])
        end_all([*([self._done] if self._done else []), *([self._ticket] if self._ticket else [])])
        for bucket in self._buckets:
            bucket.cut_off()


class _Bucket:
    """Some parameters, and the buffer from which their gradients are sent."""

    def __init__(self, number: int, parameters: list[torch.nn.Parameter], ranges: Ranges, world: PointToPoint) -> None:
        self.parameters, self._world = parameters, world
        self._flat = torch.zeros(ranges.lengths[number], dtype=parameters[0].dtype)
        self._parts = [self._flat[ranges.part(number, server)] for server in range(ranges.servers)]
        self._begins = {p: ranges.slots[p].begin for p in parameters}
        self._taken: set[torch.nn.Parameter] = set()
        self._sending: list[Handle] = []

    def take(self, p: torch.nn.Parameter) -> None:
        """Copies p.grad into the buffer, and frees it; zeros where there is none."""
        self.finish()
        view = self._flat[self._begins[p] : self._begins[p] + p.numel()]
        if p.grad is None:
            view.zero_()
        else:
            view.view(p.shape).copy_(p.grad)
        p.grad = None
        self._taken.add(p)

    def start(self) -> None:
        """Starts to send it."""
        for p in self.parameters:
            if p not in self._taken:
                self.take(p)
        self._taken = set()
        self._sending = [self._world.start_send(part, server, "gradient", GRADIENT) for server, part in enumerate(self._parts)]

    def cut_off(self) -> None:
        end_all(self._sending)

    def finish(self) -> None:
        """Waits until the last gradient is sent."""
        for handle in self._sending:
            handle.wait()
        self._sending = []
