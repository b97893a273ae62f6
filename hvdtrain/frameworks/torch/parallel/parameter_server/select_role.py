"""Whether a rank is a server or a worker: the first servers.count ranks are servers."""

from __future__ import annotations

from hvdtrain.comm.communicator import interruptible, point_to_point
from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.parallel.parameter_server.agreement import Agreement
from hvdtrain.frameworks.torch.parallel.parameter_server.ranges import Ranges
from hvdtrain.frameworks.torch.parallel.parameter_server.server import Server
from hvdtrain.frameworks.torch.parallel.parameter_server.turns import LEADER, AllWorkers, Follower, Leader, Turns
from hvdtrain.frameworks.torch.parallel.parameter_server.worker import Worker
from hvdtrain.frameworks.torch.parallel.strategy import NamedParameters, Strategy


def server_or_worker(config: Config, mesh: Mesh, named: NamedParameters, stopwatch: Stopwatch) -> Strategy:
    """The strategy of this rank."""
    servers, world = config.servers, point_to_point(mesh.world, config.where("servers.count"))
    ranges = Ranges(named, int(config.comm.bucket_mb * 2**20), mesh.servers)
    if world.rank >= mesh.servers:
        return Worker(servers, ranges, world, stopwatch)
    workers = range(mesh.servers, world.size)
    turns: Turns = AllWorkers(workers)
    agreement = None
    if servers.are_asynchronous:
        if config.guard.lost == "shrink" and mesh.servers > 1:
            agreement = Agreement(interruptible(mesh.world, config.where("guard.lost")), mesh.role)
        is_leader = world.rank == LEADER
        turns = Leader(world, mesh.servers, workers, servers.most_stale) if is_leader else Follower(world, workers)
    return Server(servers, ranges, world, mesh.role, turns, stopwatch, agreement)
