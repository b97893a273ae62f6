"""The mesh of a job, and the groups of ranks that every engine's split() computes."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.comm.launcher_variables import Placement
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.parallel import ParallelConfig
from hvdtrain.errors import UserError

PIECES = 12  # pieces shown of a list of ranks
ALONE: Communicator = SingleProcessCommunicator()
# in the order of a rank's coordinates: ranks with consecutive layers, with different samples, with
# parts of the same layers
AXES = ("pipeline", "data", "tensor")


class Coordinates(NamedTuple):
    """A rank's coordinates in the mesh. The ranks of a tensor group are neighbours, so that a
    launcher puts them on one host; the stages of a pipeline are far apart."""

    stage: int
    data: int
    tensor: int


class Mesh(NamedTuple):
    """The communicators of a job, created once."""

    world: Communicator  # all ranks
    data: (
        Communicator  # the ranks that read different samples, and hold the same part of the layers
    )
    tensor: (
        Communicator  # the ranks that read the same samples, and each compute a part of every layer
    )
    parts: Communicator  # the ranks that together hold one copy of the model and its training state
    shard: Communicator  # the ranks of `data` that the training state is sharded over
    replicas: Communicator  # the ranks with this rank's shard, one in each group of `parts`
    # the ranks of `data` by group of shards (rows); the ranks of one column hold the same shard
    table: tuple[tuple[int, ...], ...]
    # the ranks that read the same samples and hold the stages of the model, with the same part of
    # their layers
    pipe: Communicator = ALONE
    first_reader: int = 0  # ranks below it read no training samples
    # If there are such ranks: on them, the group of all of them; on other ranks, the group that
    # divides a step's samples
    role: Communicator = ALONE
    # If several ranks of `data` read the same samples, and each computes a part of every sample:
    # the group of these ranks, and the ranks with the same part of other samples
    same_samples: Communicator = ALONE
    other_samples: Communicator | None = None

    @property
    def readers(self) -> Communicator | None:
        """The ranks that divide the samples of a step; None on a rank that reads none."""
        if not self.first_reader:
            return self.evaluators
        return None if self.world.rank < self.first_reader else self.role

    @property
    def evaluators(self) -> Communicator:
        """The ranks that divide the samples of an evaluation."""
        return self.data if self.other_samples is None else self.other_samples

    @property
    def counts(self) -> bool:
        """Whether this rank contributes to sums over samples. Ranks that read the same samples
        count them once, on the last stage."""
        is_first = self.tensor.rank == 0 and self.same_samples.rank == 0
        return is_first and self.pipe.rank == self.pipe.size - 1

    def summary(self) -> str:
        """Returns the mesh for people: "2 data x 2 tensor", "2 pipeline x 2 data"."""
        sizes = (self.pipe.size, self.data.size, self.tensor.size)
        return mesh_summary(*sizes, context=self.same_samples.size)


def mesh_summary(pipeline: int, data: int, tensor: int, *, context: int = 1) -> str:
    """Returns the axes for people, without those of length 1: "2 data x 2 tensor". context: of the
    `data` ranks, how many divide the positions of the same samples."""
    sizes = {"pipeline": pipeline, "data": data // context, "context": context, "tensor": tensor}
    return " x ".join(
        f"{size} {name}" for name, size in sizes.items() if size > 1 or name == "data"
    )


def one_group(world: Communicator) -> Mesh:
    """Returns the mesh of pure data parallelism: every rank reads its own samples, and shards are
    over all ranks."""
    return Mesh(world, world, ALONE, world, world, ALONE, (tuple(range(world.size)),))


def make_mesh(world: Communicator, config: Config) -> Mesh:
    """Returns the mesh that a configuration describes. Every rank calls it.

    Raises UserError if hosts have different numbers of ranks, or if the engine does not support
    groups.
    """
    mesh = _mesh_of_samples(world, config)
    parallel = config.parallel
    own = coordinates(world.rank, world.size // parallel.ranks, parallel.part_ranks)
    return shared_samples(mesh, parallel, lambda color: _group(world, color(own)))


def shared_samples(
    mesh: Mesh,
    parallel: ParallelConfig,
    group: Callable[[Callable[[Coordinates], int]], Communicator],
) -> Mesh:
    """Returns the mesh in which neighbours of `data` read the same samples, as many as divide the
    positions of a sample.

    group: returns this rank's communicator for a color computed from coordinates.
    """
    ranks = parallel.ranks_of_sample
    if ranks == 1:
        return mesh
    readers = mesh.data.size // ranks

    def part(place: Coordinates) -> int:
        return place.stage * parallel.part_ranks + place.tensor

    same = group(lambda place: part(place) * readers + place.data // ranks)
    other = group(lambda place: part(place) * ranks + place.data % ranks)
    return mesh._replace(same_samples=same, other_samples=other)


def _mesh_of_samples(world: Communicator, config: Config) -> Mesh:
    """Returns the mesh in which a rank computes the whole of each of its samples."""
    if config.parallel.ranks > 1:
        return _of_layers(world, config)
    if first := config.first_reader(world.size):
        return _with_roles(world, first, config.is_asynchronous)
    table = _hosts(world) if config.shard.group == "node" else (tuple(range(world.size)),)
    if len(table) == 1:
        return one_group(world)
    if len({len(ranks) for ranks in table}) > 1:
        what = (
            f"the hosts have {', '.join(str(len(ranks)) for ranks in table)} ranks, but "
            "shard.group=node needs the same number on each"
        )
        raise UserError(
            what,
            config.where("shard.group"),
            "the same number of ranks on each host, or shard.group=all",
        )
    row, column = next(
        (i, ranks.index(world.rank)) for i, ranks in enumerate(table) if world.rank in ranks
    )
    shard = _group(world, row)
    replicas = _group(world, column)
    return Mesh(world, world, ALONE, shard, shard, replicas, table)


def coordinates(rank: int, data: int, tensor: int) -> Coordinates:
    """Returns the coordinates of a rank in a mesh with these sizes of `data` and `tensor`."""
    return Coordinates(rank // tensor // data, rank // tensor % data, rank % tensor)


def place_of(rank: int, size: int, parallel: ParallelConfig) -> str:
    """Returns "stage 1, data 0, context 1, tensor 0" for a rank of `size`, without axes of length
    1; empty if every rank computes whole samples with a whole model."""
    positions = parallel.ranks_of_sample
    if parallel.ranks * positions == 1:
        return ""
    stage, data, tensor = coordinates(rank, size // parallel.ranks, parallel.part_ranks)
    names = (
        [f"stage {stage}"] * parallel.has_stages
        + [f"data {data // positions}"]
        + [f"context {data % positions}"] * (positions > 1)
        + [f"tensor {tensor}"] * (parallel.part_ranks > 1)
    )
    return ", ".join(names)


def _of_layers(world: Communicator, config: Config) -> Mesh:
    own = coordinates(world.rank, world.size // config.parallel.ranks, config.parallel.part_ranks)
    return mesh_of_layers(world, config, lambda color: _group(world, color(own)))


def mesh_of_layers(
    world: Communicator,
    config: Config,
    group: Callable[[Callable[[Coordinates], int]], Communicator],
) -> Mesh:
    """group: returns this rank's communicator for a color computed from coordinates."""
    parallel = config.parallel
    readers = world.size // parallel.ranks
    data = group(lambda rank: rank.stage * parallel.part_ranks + rank.tensor)
    tensor = (
        group(lambda rank: rank.stage * readers + rank.data) if parallel.part_ranks > 1 else ALONE
    )
    pipe = (
        group(lambda rank: rank.data * parallel.part_ranks + rank.tensor)
        if parallel.has_stages
        else ALONE
    )
    table = (tuple(range(data.size)),)
    if config.shard.stage:
        return Mesh(world, data, tensor, world, data, ALONE, table, pipe)
    several = parallel.part_ranks > 1 and parallel.has_stages
    if several:
        parts = group(lambda rank: rank.data)
    elif parallel.has_stages:
        parts = pipe
    else:
        parts = tensor
    return Mesh(world, data, tensor, parts, ALONE, data, table, pipe)


def _with_roles(world: Communicator, first_reader: int, is_asynchronous: bool) -> Mesh:
    reads = world.rank >= first_reader
    group = _group(world, int(reads))
    alone = is_asynchronous and reads  # a step is one rank's
    return one_group(world)._replace(first_reader=first_reader, role=ALONE if alone else group)


def _group(world: Communicator, color: int) -> Communicator:
    group = world.split(color)
    assert group is not None, "every rank has a color"
    return group


def _hosts(world: Communicator) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each host. A collective."""
    hosts = split_groups(world, 0).hosts
    return tuple(
        tuple(rank for rank, host in enumerate(hosts) if host == number)
        for number in sorted(set(hosts))
    )


class Groups(NamedTuple):
    """The groups that a communicator is split into, the same on all of its ranks."""

    # the ranks of each group, ascending; groups in the order of their colors
    members: list[list[int]]
    hosts: list[int]  # for each rank of the communicator, the number of its host

    def group_of(self, rank: int) -> list[int] | None:
        """Returns the group of a rank of the communicator; None if it is in none."""
        return next((group for group in self.members if rank in group), None)

    def place(self, rank: int) -> Placement:
        """Returns the placement of a rank of the communicator in its group."""
        group = self.group_of(rank)
        assert group is not None, rank
        beside = [member for member in group if self.hosts[member] == self.hosts[rank]]
        return Placement(group.index(rank), len(group), beside.index(rank), len(beside), "split")


def split_groups(communicator: Communicator, color: int | None) -> Groups:
    """Returns the groups of equal colors. A collective."""
    table = communicator.allgather_object((color, socket.gethostname(), communicator.local_rank))
    ranks_of: dict[int, list[int]] = {}
    for rank, (theirs, _, _) in enumerate(table):
        if theirs is not None:
            ranks_of.setdefault(theirs, []).append(rank)
    members = [ranks_of[each] for each in sorted(ranks_of)]
    return Groups(members, number_hosts([(name, local_rank) for _, name, local_rank in table]))


def number_hosts(places: Sequence[tuple[str, int]]) -> list[int]:
    """Returns the number of each rank's host; hosts are numbered in the order of their first ranks.
    places[rank]: its host's name and its local rank.

    If two ranks have the same host name and local rank, as in containers, the name stands for
    several hosts, and the second such rank is on the second host.
    """
    seen: Counter[tuple[str, int]] = Counter()
    hosts: dict[tuple[str, int], int] = {}
    numbers = []
    for name, local_rank in places:
        numbers.append(hosts.setdefault((name, seen[name, local_rank]), len(hosts)))
        seen[name, local_rank] += 1
    return numbers


def ranks_summary(ranks: Sequence[int]) -> str:
    """Formats ranks: "rank 3", "ranks 0, 2-7"; a very long list is cut, with its length."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    pieces = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    more = f", ... ({len(ranks)} ranks)" if len(pieces) > PIECES else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(pieces[:PIECES])}{more}"
