"""The table of plan --parallel: a row for each mesh, and the reason for the recommendation."""

from __future__ import annotations

import math
import textwrap
from typing import Any

from hvdtrain.cli.output import align
from hvdtrain.extras.plan.meshes.meshes import (
    MeshCandidate,
    MeshPlan,
)
from hvdtrain.training.memory import MARGIN, gib

_HEADER = ("mesh", "ms/step", "compute", "comm", "bubble", "MB sent", "memory")
_WIDTH = 120
_CLOSE = 1.05  # times the seconds of the best; a prediction cannot distinguish these


def mesh_lines(plan: MeshPlan) -> list[str]:
    nodes = math.ceil(plan.ranks / plan.machine.per_node)
    lines = [
        f"hvdtrain plan --parallel: meshes of {plan.ranks} rank{'s' if plan.ranks > 1 else ''} on "
        f"{nodes} node{'s' if nodes > 1 else ''}, "
        f"steps of {plan.batch:,} samples, the fastest first; nothing is trained",
        "",
    ]
    cells = [_HEADER, *(_cells(row) for row in plan.rows)]
    lines += align(cells)
    lines += [
        "  ms/step: predicted; compute, comm: of the busiest rank, ms; some comm may hide behind "
        "compute; bubble: waiting for other stages",
        "  MB sent: of the rank that sends most, in a step; memory: of the rank that needs most, "
        f"{MARGIN:g} x its tensors",
    ]
    if any(row.evaluates for row in plan.rows):
        lines.append("  *: the evaluation takes most: a smaller batch.evaluate takes less")
    lines += ["", *_wrapped(sentence(plan))]
    if plan.excluded:
        lines += ["", "excluded"]
        for reason, names in _by_reason(plan).items():
            lines += _wrapped(f"{'; '.join(names)}: {reason}")
    return [*lines, "", "assumed", *(line for note in plan.assumed for line in _wrapped(note))]


def _cells(row: MeshCandidate) -> tuple[str, ...]:
    time = row.time
    return (
        row.mesh.name,
        _ms(time.seconds),
        _ms(time.compute_s),
        _ms(time.communication_s),
        f"{time.bubble:.0%}" if row.mesh.has_stages else "-",
        f"{row.sent_bytes / 1e6:,.2f}",
        gib(row.needs) + "*" * row.evaluates,
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _by_reason(plan: MeshPlan) -> dict[str, list[str]]:
    meshes_of_reason: dict[str, list[str]] = {}
    for each in plan.excluded:
        meshes_of_reason.setdefault(each.reason, []).append(each.mesh.name)
    return meshes_of_reason


def sentence(plan: MeshPlan) -> str:
    """Returns the sentence that recommends a mesh, with the reason."""
    if not plan.rows:
        return (
            "no mesh fits: more ranks, more memory for each, model.recompute=all or a smaller "
            "batch.size"
        )
    best = plan.rows[0]
    close = [row for row in plan.rows[1:] if row.time.seconds <= _CLOSE * best.time.seconds]
    words = (
        f"take {best.mesh.words or 'no key: every rank has the whole model'}, "
        f"{_ms(best.time.seconds)} ms a step: {_why(best, plan)}"
    )
    if close:
        least = min([best, *close], key=lambda row: row.needs)
        words += (
            f"; as fast by prediction (within {_CLOSE - 1:.0%}): "
            f"{'; '.join(row.mesh.name for row in close)}"
        )
        if least is not best:
            words += f"; {least.mesh.name} needs the least memory of these, {gib(least.needs)}"
    return words


def _why(best: MeshCandidate, plan: MeshPlan) -> str:
    """Compares the best mesh with pure data parallelism, or with the best mesh of another kind."""
    plain = next((row for row in plan.rows if not row.mesh.words), None)
    if plain is None:
        kinds = "every rank with the whole model does not fit"
        return f"{kinds}, and of the meshes that do it takes least time"
    if best is plain:
        other = next((row for row in plan.rows if row.mesh.divides_layers), None)
        if other is None:
            return "nothing that is cut is faster"
        return (
            f"its gradients take {_ms(best.time.communication_s)} ms, once a step, and "
            f"{_difference(other, best)}"
        )
    return _difference(plain, best)


def _difference(slower: MeshCandidate, faster: MeshCandidate) -> str:
    """Names the largest difference of the slower mesh: communication, computing or waiting."""
    wait_s = [row.time.bubble * row.time.seconds for row in (slower, faster)]
    more = {
        "communication": (slower.time.communication_s, faster.time.communication_s),
        "computing and update": (slower.time.compute_s, faster.time.compute_s),
        "waiting for other stages": (wait_s[0], wait_s[1]),
    }
    kind = max(more, key=lambda name: more[name][0] - more[name][1])
    return (
        f"{slower.mesh.name} has {_ms(more[kind][0])} ms of {kind}, this one {_ms(more[kind][1])}"
    )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def mesh_json(plan: MeshPlan) -> dict[str, Any]:
    """Returns the plan for programs, in seconds and bytes."""
    machine = plan.machine
    return {
        "ranks": plan.ranks,
        "batch": plan.batch,
        "machine": {
            "flops_per_s": machine.flops_per_s,
            "touched_bytes_per_s": machine.touched_bytes_per_s,
            "updated_bytes_per_s": machine.updated_bytes_per_s,
            "inside": {
                "latency_s": machine.inside.latency_s,
                "bytes_per_s": machine.inside.bytes_per_s,
            },
            "between": {
                "latency_s": machine.between.latency_s,
                "bytes_per_s": machine.between.bytes_per_s,
            },
            "ranks_per_node": machine.per_node,
            "in_parts": machine.in_parts,
        },
        "assumed": plan.assumed,
        "meshes": [
            {
                "mesh": row.mesh._asdict(),
                "words": row.mesh.words.split(),
                "seconds": row.time.seconds,
                "compute_s": row.time.compute_s,
                "communication_s": row.time.communication_s,
                "bubble": row.time.bubble,
                "sent_bytes": row.sent_bytes,
                "memory_bytes": row.needs,
            }
            for row in plan.rows
        ],
        "excluded": [
            {"mesh": each.mesh._asdict(), "words": each.mesh.words.split(), "reason": each.reason}
            for each in plan.excluded
        ],
        "advice": sentence(plan),
    }
