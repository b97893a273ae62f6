"""Divides a traced pass into segments: a block of the model, or the operations between two blocks.
Each is compiled separately, and the host runs them in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from hvdtrain.frameworks.jax.layers import Block

Variables = dict[Any, Any]  # variable of a traced pass -> its array
_BLOCK = "hvdtrain block "  # begins the name of a traced block


def mark(number: int, block: Block) -> Block:
    """Marks a block as a call that is visible in a traced pass; used as a model's `wrap`."""

    def call(params: Any, x: Any) -> Any:
        return block(params, x)

    call.__name__ = f"{_BLOCK}{number}"
    marked: Block = jax.jit(call)
    return marked


class Segment:
    """Consecutive operations of a pass, as a function of weights and of arrays from earlier
    segments."""

    def __init__(
        self,
        whole: Any,
        block: int | None,
        operations: list[Any],
        weights: dict[Any, int],
        later: set[Any],
    ) -> None:
        """whole: the traced pass; weights: variable -> number of the parameter; later: variables
        that are read after the segment."""
        made = list(dict.fromkeys(v for each in operations for v in each.outvars))
        read = dict.fromkeys(
            v for each in operations for v in each.invars if not isinstance(v, core.Literal)
        )
        outside = [v for v in read if v not in set(made)]
        self.block = block
        self.parameters = [weights[v] for v in outside if v in weights]
        self.inputs = [v for v in outside if v not in weights]
        self.outputs = [v for v in made if v in later]
        self.carries: list[
            bool
            # for each input: whether it depends on weights, so that it has a gradient
        ] = []
        self.wanted: list[int] = []  # numbers of the outputs that have a gradient
        order = [v for v in outside if v in weights] + self.inputs
        self._closed = core.ClosedJaxpr(
            whole.replace(constvars=[], invars=order, outvars=self.outputs, eqns=operations), []
        )

    def forward(self, weights: list[Any], inputs: list[Any]) -> list[Any]:
        """Returns the outputs."""
        return list(core.jaxpr_as_fun(self._closed)(*weights, *inputs))

    def backward(
        self, weights: list[Any], inputs: list[Any], cotangents: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns the gradients of the weights and of differentiable inputs, from the gradients of
        the wanted outputs. Computes forward again."""

        def wanted(weights: list[Any], carrying: list[Any]) -> list[Any]:
            outputs = self.forward(weights, self._all_inputs(inputs, carrying))
            return [outputs[i] for i in self.wanted]

        _, pull = jax.vjp(wanted, weights, self._carrying(inputs))
        gradients: tuple[list[Any], list[Any]] = pull(cotangents)
        return gradients

    def both(self, weights: list[Any], inputs: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the outputs of the last segment, and the gradients of the loss, which is its only
        wanted output."""

        def loss(weights: list[Any], carrying: list[Any]) -> tuple[Any, list[Any]]:
            outputs = self.forward(weights, self._all_inputs(inputs, carrying))
            return outputs[self.wanted[0]], outputs

        found, pull, outputs = jax.vjp(loss, weights, self._carrying(inputs), has_aux=True)
        return outputs, *pull(jnp.ones_like(found))

    def _carrying(self, inputs: list[Any]) -> list[Any]:
        return [x for x, carries in zip(inputs, self.carries, strict=True) if carries]

    def _all_inputs(self, inputs: list[Any], carrying: list[Any]) -> list[Any]:
        of_carrying = iter(carrying)
        return [
            next(of_carrying) if carries else x
            for x, carries in zip(inputs, self.carries, strict=True)
        ]


class CutPass:
    """A function of weights and other arguments, traced for their shapes, in segments."""

    def __init__(
        self, function: Callable[..., Any], weights: Sequence[Any], arguments: Sequence[Any]
    ) -> None:
        """function(weights, *arguments) -> a tree of arrays; in training, the loss is the first."""
        closed, results = jax.make_jaxpr(function, return_shape=True)(list(weights), *arguments)
        self._results = jax.tree.structure(results)
        traced = closed.jaxpr
        with_constants = traced.replace(constvars=[], invars=[*traced.constvars, *traced.invars])
        whole, _ = dce_jaxpr(with_constants, [True] * len(traced.outvars), instantiate=True)
        behind = len(closed.consts) + len(weights)
        self._constants = dict(zip(whole.invars, closed.consts, strict=False))
        numbers = {v: number for number, v in enumerate(whole.invars[len(closed.consts) : behind])}
        self._arguments = whole.invars[behind:]
        self._outputs = whole.outvars
        self.segments = list(_segments(whole, numbers))
        self._find_the_way_back(numbers)

    def begin(self, arguments: Sequence[Any]) -> Variables:
        return self._constants | dict(zip(self._arguments, jax.tree.leaves(arguments), strict=True))

    def is_result(self, variable: Any) -> bool:
        return any(v is variable for v in self._outputs)

    def results(self, variables: Variables) -> Any:
        """Returns the function's result, after all segments have run."""
        found = [v.val if isinstance(v, core.Literal) else variables[v] for v in self._outputs]
        return jax.tree.unflatten(self._results, found)

    def _find_the_way_back(self, weights: dict[Any, int]) -> None:
        """Determines which arrays between segments have a gradient: they depend on weights, and the
        loss depends on them."""
        depend = set(weights)
        for segment in self.segments:
            segment.carries = [v in depend for v in segment.inputs]
            if segment.parameters or any(segment.carries):
                depend |= {v for v in segment.outputs if jnp.issubdtype(v.aval.dtype, jnp.inexact)}
        back = {v for v in self._outputs[:1] if not isinstance(v, core.Literal)}
        for segment in reversed(self.segments):
            segment.wanted = [i for i, v in enumerate(segment.outputs) if v in back]
            if segment.wanted:
                back |= {
                    v for v, carries in zip(segment.inputs, segment.carries, strict=True) if carries
                }


def _segments(whole: Any, weights: dict[Any, int]) -> Iterator[Segment]:
    groups = [(block, list(group)) for block, group in itertools.groupby(whole.eqns, _block_of)]
    for i, (block, operations) in enumerate(groups):
        later = [each.invars for _, after in groups[i + 1 :] for each in after]
        read = {
            v
            for variables in (*later, whole.outvars)
            for v in variables
            if not isinstance(v, core.Literal)
        }
        yield Segment(whole, block, list(map(_without_number, operations)), weights, read)


def _block_of(operation: Any) -> int | None:
    name = operation.params.get("name", "")
    return (
        int(name.removeprefix(_BLOCK))
        if isinstance(name, str) and name.startswith(_BLOCK)
        else None
    )


def _without_number(operation: Any) -> Any:
    """Returns a block without its number, so that equal blocks compare equal; any other operation
    unchanged."""
    return (
        operation
        if _block_of(operation) is None
        else operation.replace(params={**operation.params, "name": "block"})
    )


class Programs:
    """Compiled functions. Functions of equal text share one: blocks of a model are often equal, and
    each takes seconds to compile."""

    def __init__(self) -> None:
        self._by_text: dict[Any, Any] = {}
        self._of_function: dict[Any, Any] = {}

    def run(self, name: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns function(*arguments), compiled at the first call with this name. Each name stands
        for one function and arguments of the same shapes."""
        if name not in self._of_function:
            self._of_function[name] = self._compiled(function, arguments)
        return self._of_function[name](*arguments)

    def _compiled(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        lowered = jax.jit(function, keep_unused=True).lower(*arguments)
        text = lowered.as_text()
        if "callback" in text:  # of a synchronized norm; the text does not identify it
            return lowered.compile()
        key = text, lowered.in_tree, lowered.out_tree
        if key not in self._by_text:
            self._by_text[key] = lowered.compile()
        return self._by_text[key]
