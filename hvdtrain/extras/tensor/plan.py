"""The division of a model's layers for tensor parallelism, and the divided model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from hvdtrain.comm.communicator import Communicator, part_of
from hvdtrain.comm.mesh import Mesh
from hvdtrain.comm.order import SameOrder
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Cut
from hvdtrain.errors import UserError
from hvdtrain.extras.divided.divided_model import outputs_of
from hvdtrain.extras.tensor.collectives import (
    SequenceLength,
    SplitLogits,
    TensorParallelLink,
    VocabularyRange,
    whole_logits,
)
from hvdtrain.extras.tensor.keys import TensorKeys
from hvdtrain.extras.tensor.layers import (
    ColumnsLinear,
    OwnPositionsEmbedding,
    RowsLinear,
    VocabularyEmbedding,
    VocabularyHead,
)
from hvdtrain.frameworks.torch.private_api import BatchNorm
from hvdtrain.frameworks.torch.strategy import runs_ahead
from hvdtrain.tasks.task import Task

_WAY = re.compile(r"(columns|rows|vocabulary)(?: of ([1-9]\d*))?(?: by ([1-9]\d*))?|sequence")
_WAYS = (
    '"columns", "rows", "vocabulary" or "sequence"; "columns of 3" cuts each of 3 groups, "rows '
    'by 64" cuts between units of 64 features'
)


class Way(NamedTuple):
    """How a layer is cut."""

    kind: str  # "sequence": not cut; with parallel.sequence it sees a part of the positions
    groups: int  # groups of features; each group is partitioned
    unit: int  # features that stay together, such as the features of a head

    def cuts(self, layer: nn.Module, parts: int, index: int) -> dict[str, Cut]:
        """Returns cuts of the layer's parameters that are cut, by name."""
        if self.kind == "sequence":
            return {}
        if self.kind == "rows":
            return {"weight": Cut(1, self.groups, parts, index)}
        # 512 colours and a first token: hardly ever even
        length = _features(layer) if self.kind == "vocabulary" else 0
        cut = Cut(0, self.groups, parts, index, length)
        return {name: cut for name, p in layer.named_parameters(recurse=False) if p is not None}

    def new_layer(
        self,
        layer: nn.Module,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        link: TensorParallelLink,
    ) -> nn.Module:
        if self.kind == "sequence":
            return OwnPositionsEmbedding(weight, link) if isinstance(layer, nn.Embedding) else layer
        if self.kind == "vocabulary":
            whole = _features(layer)
            rows = VocabularyRange(
                part_of(whole, link.communicator.rank, link.communicator.size).start, whole
            )
            return (
                VocabularyEmbedding(weight, link, rows)
                if isinstance(layer, nn.Embedding)
                else VocabularyHead(weight, bias, link, rows)
            )
        return {"columns": ColumnsLinear, "rows": RowsLinear}[self.kind](weight, bias, link)


def _features(layer: nn.Module) -> int:
    """Returns the rows of a layer's matrix: tokens of an embedding, outputs of a linear layer."""
    weight: Any = layer.weight
    return int(weight.shape[0])


def plan_of(model: nn.Module, where: str) -> dict[str, str]:
    """Returns the model's tensor_plan(): how to partition the modules that match each pattern.
    Raises UserError if it has none."""
    if not hasattr(model, "tensor_plan"):
        fix = 'def tensor_plan(self): return {"blocks.*.fc1": "columns", "blocks.*.fc2": "rows"}'
        raise UserError(
            f"{type(model).__name__} has no tensor_plan(), which defines how its layers are "
            "divided",
            where,
            f"{fix}; or leave it out",
        )
    plan: dict[str, str] = model.tensor_plan()  # type: ignore[operator]
    return plan


def resolve(
    model: nn.Module, plan: Mapping[str, str], parts: int, where: str, sequence: bool = False
) -> dict[str, Way]:
    """Returns the way of each divided layer, by its name; with `sequence`, also of layers that see
    a part of the positions.

    Raises UserError for an unknown way, a pattern without a layer, a layer that cannot be divided
    so, sizes that do not divide evenly, and a shared parameter that would be divided in different
    ways; with `sequence` also for a parameter without a way.
    """
    layers = {name: module for name, module in model.named_modules() if name}
    ways: dict[str, Way] = {}
    for pattern, text in plan.items():
        found = _WAY.fullmatch(text)
        if not found:
            raise UserError(
                f"{pattern}: {text!r} is not a way to divide a layer",
                f"{where}, tensor_plan()",
                _WAYS,
            )
        way = Way(found[1] or "sequence", int(found[2] or 1), int(found[3] or 1))
        names = [name for name in layers if fnmatchcase(name, pattern)]
        if not names:
            raise UserError(
                f"{pattern!r} names no layer of {type(model).__name__}",
                f"{where}, tensor_plan()",
                _some(layers),
            )
        for name in names:
            _check(name, layers[name], way, parts, where)
            ways[name] = way
    if not any(way.kind != "sequence" for way in ways.values()):
        raise UserError(
            f"tensor_plan() of {type(model).__name__} names no layer to divide",
            where,
            f"{_some(layers)}; or leave it out",
        )
    _check_shared(model, ways, where)
    if sequence:
        _check_sequence(model, ways, where)
        return ways
    return {name: way for name, way in ways.items() if way.kind != "sequence"}


class TensorParallelLayers:
    """The layers of a model that its plan names, replaced in place by this rank's parts."""

    def __init__(
        self,
        model: nn.Module,
        plan: Mapping[str, str],
        communicator: Communicator,
        where: str,
        sequence: bool = False,
        order: SameOrder | None = None,
    ) -> None:
        """The model is the same on all ranks of the communicator. sequence: parallel.sequence;
        order: checks the order in which ranks compute layers. Raises UserError like resolve(),
        before anything is changed.
        """
        self._ways = resolve(model, plan, communicator.size, where, sequence)
        self._model = model
        self._communicator = communicator
        self._order = order
        self._positions = SequenceLength() if sequence else None
        self.parts: dict[nn.Parameter, nn.Parameter] = {}  # whole parameter -> its part
        self.cuts: dict[
            nn.Parameter, Cut
        ] = {}  # cuts of the partitioned parameters; the others remain replicated
        self.names: dict[str, Cut] = {}  # the same by name; a shared parameter has several

    @torch.no_grad()
    def cut(self, unit: nn.Module) -> None:
        """Cuts the layers inside of `unit`, a module of the model or the model itself. A parameter
        that several layers have stays one."""
        inside = set(unit.modules())
        new = dict[nn.Module, nn.Module]()
        layers = {
            name: module
            for name, module in self._model.named_modules()
            if name in self._ways and module in inside
        }
        for name, layer in layers.items():
            if isinstance(layer, nn.Linear | nn.Embedding):  # not yet cut
                new[layer] = self._part_of(name, layer)
        for parent in inside:
            for name, child in parent._modules.items():
                if child in new:
                    parent._modules[name] = new[child]

    def _part_of(self, name: str, layer: nn.Module) -> nn.Module:
        kept = dict(layer.named_parameters(recurse=False))
        size = self._communicator.size
        rank = self._communicator.rank
        for key, cut in self._ways[name].cuts(layer, size, rank).items():
            whole = kept[key]
            if whole not in self.parts:
                # a copy, to free the memory of the whole
                part = nn.Parameter(cut.take(whole.detach()).clone(), whole.requires_grad)
                self.parts[whole], self.cuts[part] = part, cut
            kept[key], self.names[f"{name}.{key}"] = self.parts[whole], cut
        link = TensorParallelLink(self._communicator, name, self._positions, self._order)
        return (
            self._ways[name]
            .new_layer(layer, kept["weight"], kept.get("bias"), link)
            .train(layer.training)
        )


def cut_model(
    model: nn.Module,
    plan: Mapping[str, str],
    communicator: Communicator,
    where: str = "parallel.tensor",
    sequence: bool = False,
    order: SameOrder | None = None,
) -> dict[nn.Parameter, Cut]:
    """Divides the whole model; returns the `cuts` of its TensorParallelLayers."""
    layers = TensorParallelLayers(model, plan, communicator, where, sequence, order)
    layers.cut(model)
    return layers.cuts


def order_of_layers(config: Config, mesh: Mesh, device: torch.device) -> SameOrder:
    """Returns the check that ranks of a tensor group compute layers in the same order."""
    fix = (
        "the same layers on every rank of a tensor group: chosen by its samples, or by torch.rand()"
    )
    fix += (
        ", which gives them the same numbers"
        + "; parallel.sequence=false" * TensorKeys.of(config).sequence
    )
    return SameOrder(
        mesh.tensor,
        mesh.world.rank,
        config.where("parallel.tensor"),
        fix,
        lags=runs_ahead(device, mesh.tensor),
    )


def check_cut(
    model: nn.Module, x: torch.Tensor, expected: Any, task: Task | None, where: str
) -> None:
    """Raises UserError if the partitioned model does not return the same as the whole model for x,
    or if its task has no loss for its outputs. A collective.

    task: None for a user-defined loss.
    """
    fix = 'a tensor_plan() in which "rows" follow "columns" (docs/parallel.md)'
    try:
        found = outputs_of(model, x)
    except UserError:
        raise
    except Exception as error:
        what = (
            f"{type(model).__name__}, divided by its tensor_plan(), fails: "
            f"{type(error).__name__}: {error}"
        )
        raise UserError(what, f"{where}, tensor_plan()", fix) from error
    if isinstance(found, SplitLogits) and not (task and task.takes_split_logits):
        whose = f"task.name={task.name} has" if task else "a loss of your own has"
        what = (
            f"the outputs of {type(model).__name__} are divided by vocabulary, but {whose} no "
            "loss for that"
        )
        raise UserError(
            what, f"{where}, tensor_plan()", "leave the last layer out of it, or task.name=language"
        )
    if isinstance(expected, torch.Tensor):
        found = whole_logits(found)
        if found.shape != expected.shape or not torch.allclose(
            found, expected, rtol=1e-2, atol=1e-4, equal_nan=True
        ):
            what = (
                f"{type(model).__name__}, divided by its tensor_plan(), returns other outputs "
                "than the whole model"
            )
            raise UserError(what, f"{where}, tensor_plan()", fix)


def _check(name: str, layer: nn.Module, way: Way, parts: int, where: str) -> None:
    if way.kind == "sequence":
        _check_own_positions(name, layer, where)
        return
    if type(layer) is not nn.Linear and not (
        type(layer) is nn.Embedding and way.kind == "vocabulary"
    ):
        what = (
            f"{name} is a {type(layer).__name__}: {way.kind} cuts "
            f"nn.Linear{' and nn.Embedding' if way.kind == 'vocabulary' else ''}"
        )
        raise UserError(
            what, f"{where}, tensor_plan()", "name layers of that class, not of a subclass"
        )
    if isinstance(layer, nn.Embedding):
        _check_embedding(name, layer, way.kind, where)
    if isinstance(layer, nn.Embedding):
        length = layer.num_embeddings
    elif way.kind == "rows":
        length = layer.in_features
    else:
        length = layer.out_features
    count, rest = divmod(length, way.groups * way.unit)
    units = "features" if way.unit == 1 else f"units of {way.unit} features"
    each = f"in each of {way.groups} groups " if way.groups > 1 else ""
    if rest:
        what = f"{name} has {length} features, not a multiple of {way.groups} x {way.unit}"
        raise UserError(what, f"{where}, tensor_plan()", "groups and units that divide it")
    if way.kind == "vocabulary":
        if length < parts:
            raise UserError(
                f"{name} has {length} tokens for {parts} tensor ranks",
                where,
                f"parallel.tensor={length} or less",
            )
    elif count % parts:
        divisors = [str(n) for n in range(1, min(count, 64) + 1) if count % n == 0]
        what = (
            f"{name} has {count} {units} {each}to cut, which do not split evenly over {parts} "
            "tensor ranks"
        )
        raise UserError(what, where, f"parallel.tensor={' or '.join(divisors)}")


def _check_own_positions(name: str, layer: nn.Module, where: str) -> None:
    if isinstance(layer, BatchNorm):
        what = (
            f"{name} is a {type(layer).__name__}, whose statistics would only include a part of "
            "the positions"
        )
        raise UserError(
            what,
            f"{where}, tensor_plan()",
            "a norm of each position by itself, such as nn.LayerNorm",
        )
    if isinstance(layer, nn.Embedding):
        _check_embedding(name, layer, "sequence", where)


def _check_embedding(name: str, layer: nn.Embedding, kind: str, where: str) -> None:
    if (
        layer.max_norm is not None
        or layer.scale_grad_by_freq
        or layer.sparse
        or layer.padding_idx is not None
    ):
        what = (
            f"{name} has max_norm, scale_grad_by_freq, sparse or padding_idx, which an embedding "
            f"cut by {kind} does not support"
        )
        raise UserError(
            what, f"{where}, tensor_plan()", "an nn.Embedding without them, or leave it whole"
        )


def _check_sequence(model: nn.Module, ways: Mapping[str, Way], where: str) -> None:
    """Checks that every parameter belongs to a layer in the plan. Whether its gradient is a sum
    over the group depends on the positions that the layer sees."""
    kind = type(model).__name__
    if not any(way.kind == "sequence" for way in ways.values()):
        what = (
            f'tensor_plan() of {kind} marks no layer as "sequence": without it, each layer only '
            "sees a part of the positions"
        )
        raise UserError(
            what,
            where,
            "parallel.sequence=false; or a plan like the one of model.name=gpt (docs/parallel.md)",
        )
    for name, key, _ in _parameters(model):
        if not any(name == named or name.startswith(f"{named}.") for named in ways):
            what = (
                f"tensor_plan() of {kind} does not mention {f'{name}.{key}' if name else key}, "
                "which would only see a part of the positions"
            )
            fix = (
                f'"{name}": "sequence", where it works on each position by itself'
                if name
                else "put it into a module, and name that"
            )
            raise UserError(what, f"{where}, tensor_plan()", f"{fix}; or parallel.sequence=false")


def _check_shared(model: nn.Module, ways: Mapping[str, Way], where: str) -> None:
    """Checks that a parameter shared by several layers is partitioned in the same way for all of
    them, or for none."""
    seen: dict[nn.Parameter, tuple[str, Cut | None]] = {}
    for name, key, p in _parameters(model):
        cut = ways[name].cuts(model.get_submodule(name), 1, 0).get(key) if name in ways else None
        other, theirs = seen.setdefault(p, (name, cut))
        if cut != theirs:
            what = f"{other} and {name} share one {key}, but tensor_plan() divides it in two ways"
            raise UserError(
                what,
                where,
                'the same way for both: "vocabulary" for an embedding and the head that is '
                "tied to it",
            )


def _parameters(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yields parameters of each module, with one that several modules have as often as they do."""
    for name, module in model.named_modules():
        yield from ((name, key, p) for key, p in module._parameters.items() if p is not None)


def _some(layers: Mapping[str, nn.Module]) -> str:
    linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear | nn.Embedding)]
    return (
        f"its layers are {', '.join(linear[:6])}{', ...' if len(linear) > 6 else ''}"
        if linear
        else "it has no linear layer and no embedding"
    )
