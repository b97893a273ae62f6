"""The feature that all ways to share one model among ranks have in common, and the mesh of these
ranks in the header."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvdtrain.comm.mesh import coordinates, mesh_summary
from hvdtrain.config.exclusion import Exclusion, above, among, other_than
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.parallel import ParallelConfig
from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import JobFeature, PlannedJob
from hvdtrain.features.of_extras import Added, AddedRows


def _divides_ranks(job: PlannedJob) -> Iterator[UserError]:
    parallel = job.config.parallel
    positions = parallel.ranks_of_sample
    ranks = parallel.ranks * positions
    if job.ranks % ranks:
        key = f"parallel.{parallel.cut_by}"
        of_positions = f" x {positions} ranks of a sample" * (positions > 1)
        what = (
            f"{parallel.summary()}{of_positions} does not divide the {job.ranks} ranks of the job"
        )
        yield UserError(what, job.where(key), f"a multiple of {ranks} ranks, or another {key}")


def _whole(config: Config) -> str:
    return " ".join(f"parallel.{name}=1" for name, size in config.parallel.axes.items() if size > 1)


PARTS = "hvdtrain.extras.divided.divided_model:DividedModel"
GAUGE = "hvdtrain.extras.divided.gauge:mesh_gauge"
_NAMES = 10  # columns of the header


def mesh_lines(parallel: ParallelConfig, hosts: Sequence[str]) -> list[str]:
    """Returns the mesh as lines of the header; hosts[rank] is the host of a rank.

    One row for each place in `data`, whose ranks compute the same samples, and for each of the
    ranks that divide the positions of these samples; one column for each stage
    and each part of the layers:

        mesh    2 data x 2 tensor
                          tensor 0    tensor 1
                data 0    0 on n1     1 on n1
                data 1    2 on n2     3 on n2
    """
    data = len(hosts) // parallel.ranks
    positions = parallel.ranks_of_sample
    columns = [
        _column(parallel, stage, part)
        for stage in range(parallel.pipe_ranks)
        for part in range(parallel.part_ranks)
    ]
    rows = [["", *columns], *([_row(i, positions)] for i in range(data))]
    split = False
    for rank, host in enumerate(hosts):
        place = coordinates(rank, data, parallel.part_ranks)
        rows[1 + place.data].append(f"{rank} on {host}")
        split |= host != hosts[rank - place.tensor]
    width = 2 + max(len(cell) for row in rows for cell in row[1:])
    sizes = (parallel.pipe_ranks, data, parallel.part_ranks)
    names = max(_NAMES, *(len(row[0]) + 2 for row in rows))
    lines = [f"mesh    {mesh_summary(*sizes, context=positions)}"]
    lines += [
        "        " + (name.ljust(names) + "".join(cell.ljust(width) for cell in row)).rstrip()
        for name, *row in rows
    ]
    if split:
        lines.append(
            "        a tensor group is on several hosts, whose link carries the activations of "
            "every layer: parallel.tensor"
        )
        lines.append("        divides the ranks of a host if each host has a multiple of it")
    return lines


def _row(data: int, positions: int) -> str:
    """Returns the name of a place in `data`; positions: the ranks that divide the positions of a
    sample."""
    if positions == 1:
        return f"data {data}"
    return f"data {data // positions}, context {data % positions}"


def _column(parallel: ParallelConfig, stage: int, part: int) -> str:
    names = [f"stage {stage}"] * parallel.has_stages + [f"tensor {part}"] * (
        parallel.part_ranks > 1
    )
    return ", ".join(names)


# What every way to share one model among ranks has in common: a feature with these values turns it
# on. Its name and its exclusions are those of all axes of the mesh together.
SHARED_MODEL = JobFeature(
    key="",
    on=lambda config: config.parallel.ranks > 1,
    arrangement=lambda config: "" if config.parallel.has_stages else PARTS,
    gauge=GAUGE,
    chosen=lambda config: config.parallel.summary(),
    off=_whole,
    why="no rank has the whole model",
    first=(_divides_ranks,),
    excludes=(
        Exclusion("comm.op", among("adasum"), why="a rank only has the gradients of its part"),
        Exclusion("comm.local_steps", above(1), why="not implemented yet"),
        Exclusion(
            "comm.reduce", among("ddp", "distributed_optimizer"), why="these reduce over all ranks"
        ),
        Exclusion("comm.tune", among(True), why="not implemented yet"),
        Exclusion("comm.hierarchical", among(True), why="it reduces over all ranks"),
        Exclusion(
            "shard.group",
            other_than("all", "node"),
            words="shard.stage=1",
            why="a mesh defines its own groups",
        ),
        Exclusion(
            "shard.offload",
            other_than("none", "optimizer"),
            words="shard.stage=1",
            why="not implemented yet",
        ),
        Exclusion("norm.kind", among("sync"), why="not implemented yet"),
        Exclusion("log.noise_scale", among(True), why="a rank only has the gradients of its part"),
        Exclusion("speed.compile", other_than("none", "default"), why="not implemented yet"),
    ),
    lines_of_ranks=lambda config, hosts: mesh_lines(config.parallel, hosts),
)

FEATURES: tuple[Added, ...] = ()  # extras that need this one add SHARED_MODEL with their keys
ROWS: tuple[AddedRows, ...] = ()
