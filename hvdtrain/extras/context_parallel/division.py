"""DivisionByPositions: a model that computes a rank's positions of each sample, as its
context_plan() says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hvdtrain.data.packed import SEGMENTS
from hvdtrain.errors import UserError
from hvdtrain.extras.context_parallel.blocks import AttentionRule
from hvdtrain.extras.context_parallel.link import ContextLink
from hvdtrain.extras.context_parallel.outputs import OutputsOfPositions
from hvdtrain.extras.context_parallel.positions import PositionsOfRanks
from hvdtrain.extras.context_parallel.ring import RingLayer, ring_attention
from hvdtrain.extras.context_parallel.ulysses import Exchange, by_heads, by_positions
from hvdtrain.frameworks.torch.call import positions_of
from hvdtrain.frameworks.torch.forward import InParts

By = Literal["ring", "ulysses"]
Forward = Callable[..., Any]
WAYS = ("attention", "positions")
_PLAN = (
    'def context_plan(self): return {"blocks.*.attention": "attention", "positions": "positions"}'
)


class Sample(NamedTuple):
    """The samples that the model computes: how their positions are divided, and what lies in a
    row."""

    positions: PositionsOfRanks
    segments: torch.Tensor | None  # int64 (n, positions), of packed rows


class DivisionByPositions:
    """Replaces forward() of a model and of the modules in its plan, in place. A call of the model
    gets whole samples; inside, tensors have the positions of this rank. The result is
    OutputsOfPositions.

    A call with anything but tensors, such as a cache of keys and values, computes whole samples on
    every rank.
    """

    def __init__(self, model: torch.nn.Module, link: ContextLink, by: By, where: str) -> None:
        """Raises UserError if the model has no plan, or if it names no attention."""
        self._link = link
        self._by = by
        self._where = where
        self._name = type(model).__name__
        self._sample: Sample | None = None  # None: whole samples
        self.attended = set[str]()  # the modules that have called scaled_dot_product_attention()
        self.inside = ""  # the module of attention that computes
        self.modules = modules_of_plan(model, where)
        for name, (module, way) in self.modules.items():
            change = self._attention if way == "attention" else self._own_positions
            module.forward = functools.partial(change, name, module.forward)
        model.forward = functools.partial(self._model, model.forward)

    def _model(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if x is not None]
        if not all(isinstance(x, torch.Tensor) for x in tensors):
            with self._whole():
                return forward(*args, **kwargs)
        length = tensors[0].shape[1]
        self._begin(length, kwargs.get(SEGMENTS))

        def own(x: Any) -> Any:
            has_positions = x is not None and x.ndim > 1 and x.shape[1] == length
            return self._own(x) if has_positions else x

        outputs = forward(*map(own, args), **{name: own(x) for name, x in kwargs.items()})
        self._link.end("end of the forward pass")
        return self.outputs_of_part(outputs)

    def _begin(self, length: int, segments: torch.Tensor | None) -> None:
        """Divides samples with this number of positions from now on."""
        if length < (2 if self._by == "ring" else 1) * self._link.size:
            raise self._too_short(length)
        positions = PositionsOfRanks(length, self._link.size, zigzag=self._by == "ring")
        self._sample = Sample(positions, segments)

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x (n, positions, ...) to (n, own positions, ...)."""
        assert self._sample is not None, self._name
        return x[:, self._sample.positions.of(self._link.rank, x.device)]

    def own_part(self, x: torch.Tensor) -> torch.Tensor:
        """Implements SampleDivision."""
        self._begin(x.shape[1], None)
        return self._own(x)

    def outputs_of_part(self, outputs: Any) -> OutputsOfPositions:
        """Implements SampleDivision."""
        assert self._sample is not None, self._name
        positions = self._sample.positions
        count = positions.count(self._link.rank)
        local = outputs.local if isinstance(outputs, InParts) else outputs
        is_one = isinstance(local, torch.Tensor) and local.ndim > 1
        if not is_one or local.shape[1] != count:
            shape = tuple(local.shape) if is_one else type(outputs).__name__
            what = f"{self._name} returns {shape} for {count} positions of each sample"
            raise UserError(what, self._where, "a model that returns (n, positions, ...)")
        return OutputsOfPositions(outputs, self._link, positions)

    def _too_short(self, length: int) -> UserError:
        most = length // (2 if self._by == "ring" else 1)
        what = f"samples of {length} positions do not divide among {self._link.size} ranks"
        if self._by == "ring":
            what += ", which have two chunks each"
        return UserError(what, self._where, f"parallel.context={max(1, most)} or less")

    @contextmanager
    def _whole(self) -> Iterator[None]:
        before = self._sample
        self._sample = None
        try:
            yield
        finally:
            self._sample = before

    def _attention(self, name: str, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if self._sample is None:
            return forward(*args, **kwargs)
        self.inside = name
        try:
            with _ReplacedAttention(functools.partial(self._attend, name, self._sample)):
                return forward(*args, **kwargs)
        finally:
            self.inside = ""

    def _own_positions(self, name: str, forward: Forward, indices: torch.Tensor) -> Any:
        """Calls a module with the positions of this rank instead of indices from 0 on."""
        if self._sample is None:
            return forward(indices)
        positions, segments = self._sample
        rows = positions.of(self._link.rank, indices.device)
        if indices.shape[-1:] != rows.shape:
            what = (
                f"{name} of {self._name} is called with {tuple(indices.shape)}, not with the "
                f"indices of {len(rows)} positions"
            )
            raise UserError(what, f"{self._where}, context_plan()", "torch.arange(x.shape[1])")
        own = rows
        if segments is not None and indices.ndim > 1:  # they count in each sequence of a row
            own = positions_of(segments)[:, rows]
        return forward(own.expand(indices.shape))

    def _attend(
        self,
        name: str,
        sample: Sample,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Has the signature of functional.scaled_dot_product_attention()."""
        self.attended.add(name)
        packed = sample.segments is not None
        device = query.device.type
        if torch.is_autocast_enabled(device):  # as torch does before it computes this function
            dtype = torch.get_autocast_dtype(device)
            query, key, value = (x.to(dtype) for x in (query, key, value))
        self._check_attention(name, sample, query, key, value, attn_mask if not packed else None)
        rule = AttentionRule(
            is_causal or packed,
            query.shape[-1] ** -0.5 if scale is None else scale,
            sample.segments,
            dropout_p,
            int(torch.randint(2**62, ()).item()) if dropout_p else 0,
        )
        if self._by == "ring":
            return ring_attention(
                query, key, value, RingLayer(self._link, name, sample.positions, rule)
            )
        exchange = Exchange(self._link, name, sample.positions)
        query, key, value = by_heads(query, key, value, exchange)
        if packed:
            alone = PositionsOfRanks(sample.positions.length, 1, zigzag=False)
            layer = RingLayer(self._link.alone(), name, alone, rule)
            outputs = ring_attention(query, key, value, layer)
        else:
            outputs = functional.scaled_dot_product_attention(
                query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        return by_positions(outputs, exchange)

    def _check_attention(
        self,
        name: str,
        sample: Sample,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> None:
        """Raises UserError for attention that cannot be divided."""
        place = f"{self._where}, {name} of {self._name}"
        if mask is not None:
            what = f"{name} passes a mask to scaled_dot_product_attention()"
            fix = "is_causal=True without a mask; of packed rows (data.pack) the mask is known"
            raise UserError(f"{what}, which is not divided among ranks", place, fix)
        count = sample.positions.count(self._link.rank)
        for x in (query, key, value):
            if x.ndim != 4 or x.shape[2] != count:
                what = (
                    f"{name} calls scaled_dot_product_attention() with {tuple(x.shape)}, not with "
                    f"(n, heads, {count} positions, features)"
                )
                raise UserError(what, place, "self-attention of the positions of a rank")
        if self._by == "ulysses":
            for x in (query, key):
                if x.shape[1] % self._link.size:
                    what = f"{name} has {x.shape[1]} heads, which {self._link.size} ranks do not "
                    what += "divide evenly with parallel.context_by=ulysses"
                    raise UserError(what, place, "parallel.context_by=ring, or other heads")


class _ReplacedAttention(TorchFunctionMode):
    """Inside, `attend` is called instead of scaled_dot_product_attention()."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is functional.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


class Outside(_ReplacedAttention):
    """Inside, a call of scaled_dot_product_attention() by no module of the plan is an error."""

    def __init__(self, division: DivisionByPositions, where: str) -> None:
        super().__init__(self._raise)
        self._division = division
        self._where = where

    def _raise(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._division.inside:  # all positions, with some of the heads
            return functional.scaled_dot_product_attention(*args, **kwargs)
        known = ", ".join(
            name for name, (_, way) in self._division.modules.items() if way == "attention"
        )
        what = f"a module other than {known} calls scaled_dot_product_attention()"
        raise UserError(what, f"{self._where}, context_plan()", "name that module, too")


def modules_of_plan(model: torch.nn.Module, where: str) -> dict[str, tuple[torch.nn.Module, str]]:
    """Returns the modules that context_plan() names, by name, with their way: "attention" or
    "positions". Raises UserError for a model without a plan, and for a plan that fits no module."""
    kind = type(model).__name__
    if not hasattr(model, "context_plan"):
        what = f"{kind} has no context_plan(), which names its attention"
        raise UserError(what, where, f"{_PLAN}; or leave it out")
    plan: dict[str, str] = model.context_plan()  # type: ignore[operator]
    found: dict[str, tuple[torch.nn.Module, str]] = {}
    for pattern, way in plan.items():
        place = f"{where}, context_plan() of {kind}"
        if way not in WAYS:
            raise UserError(f"{pattern}: {way!r} is not known", place, " or ".join(WAYS))
        names = {
            name: module
            for name, module in model.named_modules()
            if name and fnmatchcase(name, pattern)
        }
        if not names:
            raise UserError(f"{pattern!r} names no module", place, "a name of named_modules()")
        found |= {name: (module, way) for name, module in names.items()}
    if not any(way == "attention" for _, way in found.values()):
        raise UserError(f"context_plan() of {kind} names no attention", where, _PLAN)
    return found
