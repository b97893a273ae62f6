"""The layout of a torch model over ranks: the part of each layer on each rank, from the cuts that a
job makes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hvdtrain.comm.communicator import part_of
from hvdtrain.comm.mesh import Coordinates, coordinates, place_of
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Way, shown_bytes
from hvdtrain.extras.plan.forecast.layers import LayerRange, LayoutRow, ParallelLayout
from hvdtrain.frameworks.torch.arrangement import Arrangement
from hvdtrain.frameworks.torch.arrangements import arrangement_of
from hvdtrain.frameworks.torch.call import only_one
from hvdtrain.frameworks.torch.check_outputs import example
from hvdtrain.frameworks.torch.layer import Layer, LayerCut, bytes_of_sample
from hvdtrain.frameworks.torch.model import checked_model
from hvdtrain.tasks.task import Task

_WHOLE = LayerRange(0.0, 1.0)


def layout(config: Config, task: Task, ranks: int) -> ParallelLayout:
    """Returns the layout of a job on `ranks` ranks, without training. Raises UserError if the model
    cannot be divided so."""
    parallel = config.parallel
    model = checked_model(config, task)
    like = torch.empty(0)
    layers = _layers(model, only_one(example(2, config, task, like)))
    arrangement = arrangement_of(config)
    stage_of, between = arrangement.layout_stages(model, config, task)
    cuts = arrangement.layout_cuts(model, config, ranks, layers)
    readers = ranks // parallel.ranks
    places = [coordinates(rank, readers, parallel.part_ranks) for rank in range(ranks)]
    groups = _alike(layers, stage_of, cuts)
    rows = [
        _row(alike, cuts.get(alike[0].name), stage_of.get(alike[0].name, 0), config, places)
        for alike in groups.values()
    ]
    found = ParallelLayout(
        title=f"{config.model.name}: {', '.join(_ways(arrangement, config))} on {ranks} ranks",
        ranks=[place_of(rank, ranks, parallel) or f"data {rank}" for rank in range(ranks)],
        rows=rows,
        together=[
            0 if arrangement.divides_state else rank // parallel.part_ranks for rank in range(ranks)
        ],
        updates=[
            _updated(rows, rank, place, arrangement, config, readers)
            for rank, place in enumerate(places)
        ],
        between_stages=between,
        gradients="",
        notes=arrangement.layout_notes(config),
    )
    return found._replace(gradients=_gradients(arrangement, config, found, readers))


def _layers(model: nn.Module, x: torch.Tensor) -> list[Layer]:
    """Returns the layers in model order. A forward pass of x, (2, ...), shows what is sent."""
    sent: dict[nn.Module, tuple[int, int]] = {}

    def keep(module: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        sent[module] = bytes_of_sample(inputs[0] if inputs else None), bytes_of_sample(outputs)

    hooks = [module.register_forward_hook(keep) for module in model.modules()]
    try:
        with torch.no_grad():
            model.eval()(x)
    finally:
        for hook in hooks:
            hook.remove()
    layers = []
    seen = set[nn.Parameter]()
    for name, module in model.named_modules():
        own = {key: p for key, p in module.named_parameters(recurse=False) if p not in seen}
        seen.update(own.values())
        if not own:
            continue
        largest = max(own.values(), key=lambda p: p.numel())
        label = name or ", ".join(own)
        layers.append(
            Layer(
                label,
                tuple(largest.shape),
                sum(p.nbytes for p in own.values()),
                largest.nbytes,
                *sent.get(module, (0, 0)),
            )
        )
    return layers


def _alike(
    layers: list[Layer], stage_of: dict[str, int], cuts: Mapping[str, LayerCut]
) -> dict[tuple[Any, ...], list[Layer]]:
    """Groups similar layers of the blocks in one stage, in the order of their first layers."""
    alike: dict[tuple[Any, ...], list[Layer]] = {}
    for layer in layers:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", layer.name)
        key = (pattern, stage_of.get(layer.name, 0), layer.shape, layer.bytes, cuts.get(layer.name))
        alike.setdefault(key, []).append(layer)
    return alike


def _row(
    alike: list[Layer], cut: LayerCut | None, stage: int, config: Config, places: list[Coordinates]
) -> LayoutRow:
    parallel = config.parallel
    readers = len(places) // config.parallel.ranks
    way: Way = cut.way if cut else "rows" if config.shard.stage == 3 else "whole"
    held: list[LayerRange | None] = []
    for rank, place in enumerate(places):
        if place.stage != stage % parallel.pipe_ranks:
            held.append(None)
        elif cut is None:
            held.append(_share(place.data, readers) if config.shard.stage == 3 else _WHOLE)
        elif cut.over_all:
            held.append(_part(alike[0].shape[0], rank, len(places)))
        else:
            part = _part(alike[0].shape[cut.axis] // cut.groups, place.tensor, parallel.part_ranks)
            held.append(part if config.shard.stage < 3 else _within(part, place.data, readers))
    sent, count = (cut.sent, cut.groups) if cut else ("", 1)
    whole = sum(layer.bytes - layer.weight_bytes for layer in alike) if cut and cut.axis == 1 else 0
    return LayoutRow(
        _name(alike),
        alike[0].shape,
        sum(layer.bytes for layer in alike),
        whole,
        way,
        count,
        held,
        sent,
        stage,
    )


def _updated(
    rows: list[LayoutRow],
    rank: int,
    place: Coordinates,
    arrangement: type[Arrangement],
    config: Config,
    readers: int,
) -> float:
    """Returns the bytes of weights whose optimizer state a rank has. The first rank of a tensor
    group has it for the weights that the group replicates."""
    total = 0.0
    for row in rows:
        held = row.held[rank]
        is_cut = bool(row.sent)
        if held is None or (not is_cut and place.tensor):
            continue
        shards = config.shard.stage in (1, 2) or (arrangement.divides_state and not is_cut)
        part = (row.bytes - row.whole_bytes) * (held.stop - held.start) + row.whole_bytes * (
            not place.tensor
        )
        total += part / (readers if shards else 1)
    return total


def _name(alike: list[Layer]) -> str:
    """Returns the common name of layers: "blocks.0-3.fc1"."""
    if len(alike) == 1:
        return alike[0].name
    first = alike[0].name.split(".")
    last = alike[-1].name.split(".")
    return ".".join(
        one if one == other else f"{one}-{other}" for one, other in zip(first, last, strict=True)
    )


def _share(index: int, parts: int) -> LayerRange:
    return LayerRange(index / parts, (index + 1) / parts)


def _part(length: int, rank: int, ranks: int) -> LayerRange:
    """Returns a rank's part of a divided layer; the first ranks have one more element."""
    part = part_of(length, rank, ranks)
    return LayerRange(part.start / length, part.stop / length)


def _within(part: LayerRange, index: int, parts: int) -> LayerRange:
    """Returns the shard of a part."""
    width = (part.stop - part.start) / parts
    return LayerRange(part.start + index * width, part.start + (index + 1) * width)


def _ways(arrangement: type[Arrangement], config: Config) -> list[str]:
    found = arrangement.layout_ways(config)
    found += [f"shard.stage={config.shard.stage}"] if config.shard.stage else []
    return found or ["data parallel"]


def _gradients(
    arrangement: type[Arrangement], config: Config, found: ParallelLayout, readers: int
) -> str:
    """Returns what data-parallel ranks exchange in a step."""
    if readers == 1:
        return ""
    sent = max(map(found.weight_bytes, range(len(found.ranks))))
    if arrangement.divides_state:
        sent = sum(row.bytes for row in found.rows if row.way == "whole")
    if config.shard.stage == 3:
        whole = sum(row.bytes for row in found.rows)
        return (
            "weights gathered in each pass, gradients summed to their owners: "
            f"{shown_bytes(whole)} each"
        )
    if config.shard.stage or arrangement.divides_state:
        return f"gradients summed to their owners, new weights sent back: {shown_bytes(sent)} each"
    return (
        "gradients summed over the ranks of data: "
        f"{'up to ' if config.parallel.has_stages else ''}{shown_bytes(sent)}"
    )
