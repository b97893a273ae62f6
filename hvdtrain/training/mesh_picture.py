"""The mesh of a job for people: which rank on which host has which place in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.comm.mesh import coordinates
from hvdtrain.config.schema import ParallelConfig

_NAMES = 10  # columns


def mesh_lines(parallel: ParallelConfig, hosts: Sequence[str]) -> list[str]:
    """For the header, hosts[rank] is rank's; no line where every rank has a whole model.

    One row for each place in `data`, whose ranks read the same samples, one column for each stage and each part of the layers:

        mesh    2 data x 2 tensor
                          tensor 0    tensor 1
                data 0    0 on n1     1 on n1
                data 1    2 on n2     3 on n2
    """
    if parallel.ranks == 1:
        return []
    readers = len(hosts) // parallel.ranks
    columns = [_column(parallel, stage, part) for stage in range(parallel.pipeline) for part in range(parallel.tensor)]
    rows = [["", *columns], *([f"data {i}"] for i in range(readers))]
    split = False
    for rank, host in enumerate(hosts):
        place = coordinates(rank, readers, parallel.tensor)
        rows[1 + place.data].append(f"{rank} on {host}")
        split |= host != hosts[rank - place.tensor]
    width = 2 + max(len(cell) for row in rows for cell in row[1:])
    sizes = {"pipeline": parallel.pipeline, "data": readers, "tensor": parallel.tensor}
    lines = [f"mesh    {' x '.join(f'{size} {name}' for name, size in sizes.items() if size > 1 or name == 'data')}"]
    lines += ["        " + (name.ljust(_NAMES) + "".join(cell.ljust(width) for cell in row)).rstrip() for name, *row in rows]
    if split:
        lines.append("        a tensor group is on several hosts, whose link carries the activations of every layer: parallel.tensor")
        lines.append("        divides the ranks of a host where each host has a multiple of it")
    return lines


def mesh_fields(parallel: ParallelConfig, ranks: int) -> dict[str, Any]:
    """Fields of the event "start": ranks along each axis; and where several ranks have one model, of each rank [stage, data, tensor]."""
    readers = ranks // parallel.ranks
    axes = {"pipeline": parallel.pipeline, "data": readers, "tensor": parallel.tensor}
    if parallel.ranks == 1:
        return {"mesh": axes}
    return {"mesh": axes, "coordinates_of_rank": [list(coordinates(rank, readers, parallel.tensor)) for rank in range(ranks)]}


def _column(parallel: ParallelConfig, stage: int, part: int) -> str:
    names = [f"stage {stage}"] * (parallel.pipeline > 1) + [f"tensor {part}"] * (parallel.tensor > 1)
    return ", ".join(names)
