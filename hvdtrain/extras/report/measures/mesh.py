"""The places of a run's ranks in the mesh, and the stages of its pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from hvdtrain.comm.mesh import AXES, mesh_summary
from hvdtrain.config.sections.extra_keys import defaults, dividing_keys
from hvdtrain.records.run import RunRecord, number, numbers

MOST_RANKS = 2**20


class MeshCoordinate(NamedTuple):
    """Place of a rank in the mesh."""

    stage: int
    data: int
    tensor: int


class RunMesh(NamedTuple):
    """The mesh of a run in which several ranks share one model."""

    sizes: MeshCoordinate  # of each axis
    places: list[MeshCoordinate]  # of each rank

    @property
    def summary(self) -> str:
        """ "2 pipeline x 2 data" """
        return mesh_summary(*self.sizes)

    def name(self, rank: int) -> str:
        """Names the place of a rank: "stage 1, data 0", without axes of length 1."""
        names = zip(MeshCoordinate._fields, self.places[rank], self.sizes, strict=True)
        return ", ".join(f"{axis} {at}" for axis, at, size in names if size > 1 or axis == "data")

    def ranks_of(self, stage: int) -> list[int]:
        return [rank for rank, place in enumerate(self.places) if place.stage == stage]


class StageTimes(NamedTuple):
    """A stage of a pipeline; NaN for what was not measured."""

    ranks: list[int]
    work_ms: float  # of a step, the median over its ranks
    waiting: float  # share of the time of its passes, the mean over its ranks


def mesh_of(run: RunRecord) -> RunMesh | None:
    """Returns the mesh of a run; None if every rank has a whole model."""
    start = run.start_event
    sizes = [number(start, f"mesh.{axis}") for axis in AXES]
    coordinates = start.get("coordinates_of_rank")
    if not isinstance(coordinates, list) or not all(math.isfinite(size) for size in sizes):
        return None
    whole = MeshCoordinate(*map(int, sizes))
    if not 0 < len(coordinates) == math.prod(whole) <= MOST_RANKS or not all(
        _is_place(one, whole) for one in coordinates
    ):
        return None
    return RunMesh(whole, [MeshCoordinate(*one) for one in coordinates])


def _is_place(value: Any, sizes: MeshCoordinate) -> bool:
    if not isinstance(value, list) or len(value) != len(sizes):
        return False
    return all(type(at) is int and 0 <= at < size for at, size in zip(value, sizes, strict=True))


def ways(run: RunRecord) -> str:
    """How the ranks of a run divide the work, for people: "2 data x 2 tensor, shard.stage=1"; empty
    on one rank."""
    if not run.ranks or run.ranks == 1:
        return ""
    mesh = mesh_of(run)
    axes = [f"parallel.{axis}" for axis in AXES] if mesh else []
    usual = {key: defaults()[key] for key in dividing_keys() if key not in axes}
    usual["shard.stage"] = 0
    keys = [
        f"{key}={run.config[key]}"
        for key, value in usual.items()
        if run.config.get(key) not in (None, value)
    ]
    if mesh and mesh.sizes.stage > 1:
        keys.append(f"parallel.schedule={run.config.get('parallel.schedule')}")
    return ", ".join([mesh.summary if mesh else f"{run.ranks} data", *keys])


def stages(run: RunRecord, work_ms: Sequence[float]) -> list[StageTimes]:
    """Returns the stages of the pipeline; empty without one. work_ms: work of each rank in a
    step."""
    mesh = mesh_of(run)
    if mesh is None or mesh.sizes.stage == 1:
        return []
    waiting = bubble(run)
    rows = []
    for stage in range(mesh.sizes.stage):
        ranks = mesh.ranks_of(stage)
        works = [
            work_ms[rank] for rank in ranks if rank < len(work_ms) and math.isfinite(work_ms[rank])
        ]
        shares = [
            waiting[rank] for rank in ranks if rank < len(waiting) and math.isfinite(waiting[rank])
        ]
        rows.append(
            StageTimes(
                ranks, median(works) if works else math.nan, fmean(shares) if shares else math.nan
            )
        )
    return rows


def bubble(run: RunRecord) -> list[float]:
    """Returns for each rank the share of the time of its passes that it waits, the mean over steps;
    empty if not measured."""
    rows = [(numbers(event, "bubble"), number(event, "steps")) for event in run.step_events()]
    rows = [(row, steps) for row, steps in rows if row and steps > 0]
    # a resumed job may have other ranks
    rows = [(row, steps) for row, steps in rows if len(row) == len(rows[-1][0])]
    total = sum(steps for _, steps in rows)
    return (
        [sum(row[rank] * steps for row, steps in rows) / total for rank in range(len(rows[-1][0]))]
        if rows
        else []
    )


def predicted_bubble(run: RunRecord) -> float:
    """Returns the bubble of the schedule with equally slow stages; NaN if unknown."""
    return next(
        (
            share
            for event in reversed(run.step_events())
            if math.isfinite(share := number(event, "bubble_predicted"))
        ),
        math.nan,
    )


def stage_summary(run: RunRecord, work_ms: Sequence[float]) -> str:
    """Returns a sentence about the slowest stage and the stage that waits most; empty without a
    pipeline, and if nothing was measured."""
    found = stages(run, work_ms)
    if not found or not all(
        math.isfinite(stage.work_ms) and math.isfinite(stage.waiting) for stage in found
    ):
        return ""
    slowest = max(range(len(found)), key=lambda stage: found[stage].work_ms)
    waiting = max(range(len(found)), key=lambda stage: found[stage].waiting)
    middle = median(stage.work_ms for stage in found)
    line = (
        f"stage {slowest} is slowest: {found[slowest].work_ms:.3g} ms of own work a step, median "
        f"of the stages {middle:.3g}; "
    )
    line += (
        f"stage {waiting} waits most, {found[waiting].waiting:.0%} of its passes' time; bubble "
        f"{fmean(bubble(run)):.0%}"
    )
    predicted = predicted_bubble(run)
    return line + (
        f", {predicted:.0%} by the schedule with equal stages" if math.isfinite(predicted) else ""
    )
