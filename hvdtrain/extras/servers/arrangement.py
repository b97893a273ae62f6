"""Servers: the arrangement of servers.count, in which some ranks hold the weights and the others
compute gradients; the role of a rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hvdtrain.comm.communicator import interruptible, point_to_point
from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.core.progress import GoOn, Progress, WorkerUpdate
from hvdtrain.errors import UserError
from hvdtrain.extras.servers.keys import ServersConfig
from hvdtrain.extras.servers.losses import ServerAgreement, go_on_from
from hvdtrain.extras.servers.ranges import Ranges
from hvdtrain.extras.servers.server import Server
from hvdtrain.extras.servers.turns import (
    LEADER,
    AllWorkers,
    Follower,
    Leader,
    Turns,
)
from hvdtrain.extras.servers.worker import Worker
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.arrangement import Arrangement
from hvdtrain.frameworks.torch.strategy import Around, NamedParameters, Strategy, Wrapped


class Servers(Arrangement):
    """The arrangement of servers.count: some ranks hold the weights, the others compute
    gradients."""

    divides = True

    def strategy(self, named: NamedParameters, optimizer: torch.optim.Optimizer) -> Strategy:
        return Role(self.making.config, self.making.mesh, named, self.making.stopwatch)

    @classmethod
    def check_predictable(cls, config: Config) -> None:
        what = "the memory of parameter servers and their workers is not predicted"
        raise UserError(
            what,
            config.where("servers.count"),
            "train for some steps: a job prints the memory of its ranks at the end",
        )


class Role(Around):
    """The strategy of a rank, which delegates to the strategy of its current role, server or
    worker.

    The first servers.count ranks are servers; after a loss a rank may have another role.
    """

    def __init__(
        self, config: Config, mesh: Mesh, named: NamedParameters, stopwatch: Stopwatch
    ) -> None:
        self._config = config
        self._named = named
        self._stopwatch = stopwatch
        self._take(mesh)

    def _take(self, mesh: Mesh) -> None:
        self._world = mesh.world
        self._now = server_or_worker(self._config, mesh, self._named, self._stopwatch)
        super().__init__(self._now)
        self.summary = self._now.summary
        self.local_mean = self._now.local_mean

    def own_steps(self, steps: Sequence[Progress]) -> Iterable[Progress]:
        return self._now.own_steps(steps)

    def read_updates(self) -> list[WorkerUpdate]:
        return self._now.read_updates()

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        self._wrapped = Wrapped(forward, optimizer)
        return self._now.wrap(forward, optimizer)

    def divide_anew(self, mesh: Mesh) -> torch.optim.Optimizer:
        self._now.cut_off()
        self._take(mesh)
        return self._now.wrap(*self._wrapped).optimizer

    def how_to_go_on(self, former_rank: int, kept: int) -> GoOn | None:
        if self._config.guard.lost != "shrink":
            return None
        self._now.cut_off()
        return go_on_from(
            self._world.allgather_object(self._now.report(former_rank, kept)),
            ServersConfig.of(self._config).count,
        )

    def go_on(self, how: GoOn, kept: int, mesh: Mesh) -> None:
        self._now.go_on(how, kept, mesh)
        self.summary = self._now.summary


def server_or_worker(
    config: Config, mesh: Mesh, named: NamedParameters, stopwatch: Stopwatch
) -> Server | Worker:
    """Returns the strategy of this rank's role."""
    servers = ServersConfig.of(config)
    world = point_to_point(mesh.world, config.where("servers.count"))
    ranges = Ranges(named, config.comm.bucket_bytes(), mesh.first_reader)
    if world.rank >= mesh.first_reader:
        return Worker(servers, ranges, world, stopwatch)
    workers = range(mesh.first_reader, world.size)
    turns: Turns = AllWorkers(workers)
    agreement = None
    if servers.is_asynchronous:
        if config.guard.lost == "shrink" and mesh.first_reader > 1:
            agreement = ServerAgreement(
                interruptible(mesh.world, config.where("guard.lost")), mesh.role
            )
        is_leader = world.rank == LEADER
        turns = (
            Leader(world, mesh.first_reader, workers, servers.most_stale)
            if is_leader
            else Follower(world, workers)
        )
    return Server(servers, ranges, world, mesh.role, turns, stopwatch, agreement)
