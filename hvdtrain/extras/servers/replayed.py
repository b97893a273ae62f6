"""Replay: asynchronous training again, in one process, from the log of its updates: servers and one
worker as threads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from hvdtrain.comm.communicator import PointToPoint
from hvdtrain.comm.mesh import ALONE, Mesh, one_group
from hvdtrain.comm.threads import ThreadCommunicator, ThreadRanks, run_threads
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays
from hvdtrain.core.progress import Hyper, Progress, WorkerUpdate, fold
from hvdtrain.extras.servers.keys import ServersConfig
from hvdtrain.extras.servers.ranges import Ranges
from hvdtrain.extras.servers.server import Server
from hvdtrain.extras.servers.turns import (
    LEADER,
    NO_TICKET,
    TICKET,
    Read,
)
from hvdtrain.extras.servers.worker import Worker
from hvdtrain.frameworks.stopwatch import ReplaceableStopwatch
from hvdtrain.frameworks.torch.arrangement import Arrangement, Making
from hvdtrain.frameworks.torch.assemble import assemble
from hvdtrain.frameworks.torch.device import pick_device
from hvdtrain.frameworks.torch.learner import TorchLearner
from hvdtrain.frameworks.torch.model import normed_model
from hvdtrain.frameworks.torch.precision import pick_precision
from hvdtrain.frameworks.torch.step_costs import stopwatch_for
from hvdtrain.frameworks.torch.strategy import NamedParameters, Strategy
from hvdtrain.tasks.task import Task

StepInput = tuple[Hyper, list[Any]]  # arguments of Learner.step()


class Replayed:
    """Turns as they were: the one worker gets the weights that the worker of the log had, and its
    gradient is the next one."""

    def __init__(self, updates: Sequence[WorkerUpdate], world: PointToPoint) -> None:
        self._updates = updates
        self._world = world
        self._worker = world.size - 1
        self._oldest = max(update.staleness for update in updates)
        self._history: dict[int, torch.Tensor] = {}  # version -> this server's weights
        self._first = 0

    def begin(self, first: int, behind: int) -> None:
        self._first = first
        if self._world.rank == LEADER:
            for ticket in (*(update.ticket for update in self._updates), NO_TICKET):
                self._world.start_send(np.array([ticket]), self._worker, "ticket", TICKET)

    def readers(self, own: torch.Tensor, version: int) -> Sequence[Read]:
        self._history[version] = own.clone()
        self._history.pop(version - self._oldest - 1, None)
        read = version - self._updates[version - self._first].staleness
        return [Read(self._worker, self._history[read], read)]

    def chosen(self) -> Sequence[int]:
        return [self._worker]

    def read_updates(self) -> list[WorkerUpdate]:
        return []

    def cut_off(self) -> None:
        pass


def replay(
    config: Config,
    task: Task,
    updates: Sequence[WorkerUpdate],
    steps: Sequence[Progress],
    input_of: Callable[[TorchLearner, Progress], StepInput],
    threads: int,
) -> Arrays:
    """Returns Learner.state() after these updates of a new job, with update i from steps[i]. The
    bits are the same as on servers.count and any number of workers.

    threads: the number of threads on each rank. input_of: for the learner of a server, which reads
    no samples, or of the worker.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        servers = ServersConfig.of(config).count
        world = ThreadRanks(servers + 1)
        group = ThreadRanks(servers)
        learners = _learners(config, task, updates, world, group)

        def train(learner: TorchLearner) -> Arrays:
            for p in learner.own_steps(steps):
                hyper, micro = input_of(learner, p)
                learner.step(micro, hyper, fold(config.seed, p.step))
            learner.sync_buffers(learner.mesh.world)
            return learner.state()

        return run_threads(
            [world, group],
            [lambda learner=learner: train(learner) for learner in learners],  # type: ignore[misc]
        )[0]
    finally:
        torch.set_num_threads(before)


def _learners(
    config: Config,
    task: Task,
    updates: Sequence[WorkerUpdate],
    world: ThreadRanks,
    group: ThreadRanks,
) -> list[TorchLearner]:
    """Returns the learners of the servers and of the worker."""
    device = pick_device(config, ALONE)
    precision = pick_precision(config, device, ALONE)
    torch.manual_seed(fold(config.seed) & (2**63 - 1))
    model = normed_model(config, task, ALONE).to(device=device, dtype=precision.weights)
    learners = []
    for rank in range(world.size):
        stopwatch = ReplaceableStopwatch(stopwatch_for(device))
        making = Making(config, task, _mesh(world, group, rank), device, precision, stopwatch)
        learners.append(
            assemble(_InOneProcess(making, model if not rank else copy.deepcopy(model), updates))
        )
    return learners


class _InOneProcess(Arrangement):
    """A rank that is a thread."""

    def __init__(
        self, making: Making, model: torch.nn.Module, updates: Sequence[WorkerUpdate]
    ) -> None:
        self._given = model
        self._updates = updates
        super().__init__(making)

    def make(self) -> torch.nn.Module:
        return self._given

    def strategy(self, named: NamedParameters, optimizer: torch.optim.Optimizer) -> Strategy:
        config = self.making.config
        mesh = self.making.mesh
        stopwatch = self.making.stopwatch
        servers = ServersConfig.of(config)
        world = cast(PointToPoint, mesh.world)
        ranges = Ranges(named, config.comm.bucket_bytes(), servers.count)
        if world.rank == servers.count:
            return Worker(servers, ranges, world, stopwatch)
        return Server(servers, ranges, world, mesh.role, Replayed(self._updates, world), stopwatch)


def _mesh(world: ThreadRanks, group: ThreadRanks, rank: int) -> Mesh:
    role: Any = ThreadCommunicator(group, rank) if rank < group.size else ALONE
    everyone: Any = ThreadCommunicator(world, rank)
    return one_group(everyone)._replace(first_reader=group.size, role=role)
