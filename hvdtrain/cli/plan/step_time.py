"""The seconds of a step on a mesh, from what its ranks compute and send: alpha-beta costs of each collective. Arithmetic only."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from hvdtrain.cli.bench.cost_model import BACKWARD, Link
from hvdtrain.cli.plan.machine import Machine
from hvdtrain.comm.counted import Moved
from hvdtrain.config.schema import Config
from hvdtrain.frameworks.footprint import PlannedWork
from hvdtrain.frameworks.torch.parallel.pipeline.schedule import Seconds, timeline

_BETWEEN_STAGES = re.compile(r"pipeline\.(\d+)(\.gradient)?")
_IN_PASSES = ("tensor.", "dense.", "planned.")  # "planned.": of FSDP2
_OF_GRADIENTS = re.compile(r"gradient(\.\d+)?")


class StepTime(NamedTuple):
    """A step of the slowest rank; seconds is no more than the sum of the others, since some communication hides behind computing."""

    seconds: float
    compute_s: float  # of passes and update
    communication_s: float  # of all that it takes part in, as if nothing were hidden
    bubble: float  # share of the time of the passes in which a rank waits for other stages, 0 to 1


def moved_s(moved: Moved, machine: Machine) -> float:
    """Seconds of one collective.

    Rings: an allreduce of B bytes on n ranks has 2 (n - 1) messages of B / n one after the other, a reduce-scatter and an all-gather n - 1;
    trees: a broadcast and a reduction have log2 n messages of B, rounded up. On several nodes the slower link counts. The ranks of a node
    share its link: all groups like this one send at the same time.
    """
    n, size = len(moved.ranks), moved.size_bytes
    steps, part = {
        "allreduce": (2 * (n - 1), size / n),
        "reduce-scatter": (n - 1, size / n),
        "all-gather": (n - 1, size / n),
        "broadcast": (math.ceil(math.log2(n)), size),
        "reduce": (math.ceil(math.log2(n)), size),
        "message": (1, size),
    }[moved.kind]
    factor = machine.in_parts if n > 2 and moved.kind in ("reduce-scatter", "all-gather") else 1.0
    return factor * max(steps * (link.latency_s + part / link.bytes_per_s) for link in _links(moved.ranks, machine))


def _links(ranks: Sequence[int], machine: Machine) -> list[Link]:
    nodes = [rank // machine.per_node for rank in ranks]
    if len(set(nodes)) == 1:
        return [machine.inside]
    sharers = machine.per_node / max(nodes.count(node) for node in set(nodes))
    shared = machine.between._replace(bytes_per_s=machine.between.bytes_per_s / max(1.0, sharers))
    if len(set(nodes)) == len(nodes):
        return [shared]
    return [machine.inside, shared]


def step_time(config: Config, works: Sequence[PlannedWork], machine: Machine, overlaps: bool) -> StepTime:
    """works: of the first rank of each stage. overlaps: whether reductions of gradients go on while backward computes."""
    if config.parallel.pipeline > 1:
        return _of_pipeline(config, works, machine)
    (work,) = works
    passes_s, update_s = computing_s(work, machine)
    in_passes, gradients, rest = _sorted(work.moved, machine)
    reduction_s, hidden_s = sum(gradients), 0.0
    if overlaps and gradients:  # of the last bucket nothing is left to hide behind
        hidden_s = min(reduction_s - gradients[-1], BACKWARD * passes_s / work.passes)
    communication_s = sum(in_passes) + reduction_s + sum(rest)
    return StepTime(passes_s + update_s + communication_s - hidden_s, passes_s + update_s, communication_s, 0.0)


def computing_s(work: PlannedWork, machine: Machine) -> tuple[float, float]:
    """Seconds of the passes and of the update."""
    passes_s = work.flops / machine.flops_per_s + work.touched_bytes / machine.touched_bytes_per_s
    return passes_s, work.updated_bytes / machine.updated_bytes_per_s


def _sorted(moved: Sequence[Moved], machine: Machine) -> tuple[list[float], list[float], list[float]]:
    """Seconds inside of passes, of gradients, of all else; without messages between stages."""
    in_passes, gradients, rest = list[float](), list[float](), list[float]()
    for each in moved:
        if not (each.kind == "message" and _BETWEEN_STAGES.fullmatch(each.name)):
            where = in_passes if each.name.startswith(_IN_PASSES) else gradients if _OF_GRADIENTS.fullmatch(each.name) else rest
            where.append(moved_s(each, machine))
    return in_passes, gradients, rest


def _of_pipeline(config: Config, works: Sequence[PlannedWork], machine: Machine) -> StepTime:
    """Passes by the schedule's simulation, then what is reduced and updated, of the rank that takes longest."""
    parallel, micro = config.parallel, works[0].passes
    virtual = parallel.stages_of_rank
    share = 1 / (4 if config.model.recompute != "none" else 3)  # of the operations, which a forward pass has
    seconds, transfers = [], [0.0] * (len(works) * virtual)
    after_s, compute_s, communication_s = 0.0, 0.0, 0.0
    for work in works:
        passes_s, update_s = computing_s(work, machine)
        in_passes, gradients, rest = _sorted(work.moved, machine)
        forward_s = (share * passes_s + sum(in_passes) / 2) / micro / virtual
        seconds.append(Seconds(forward_s, (passes_s + sum(in_passes)) / micro / virtual - forward_s))
        of_messages = 0.0
        for each in work.moved:
            found = _BETWEEN_STAGES.fullmatch(each.name) if each.kind == "message" else None
            if found:
                one_s = moved_s(each, machine)
                transfers[int(found[1])] = max(transfers[int(found[1])], one_s)
                of_messages += one_s
        after_s = max(after_s, sum(gradients) + sum(rest) + update_s)
        compute_s = max(compute_s, passes_s + update_s)
        communication_s = max(communication_s, sum(in_passes) + sum(gradients) + sum(rest) + of_messages)
    passes = timeline(parallel.schedule, len(works), micro, virtual, seconds * virtual, transfers=transfers)
    return StepTime(passes.seconds + after_s, compute_s, communication_s, passes.bubble)
