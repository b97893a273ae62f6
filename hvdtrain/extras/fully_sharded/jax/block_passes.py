"""shard.stage=3 in JAX: each rank has its part of every weight and gradient, and the full weights
of one block at a time.

The host drives a pass block by block. In forward it gathers a block's weights, runs the compiled
block and drops the weights. In backward it gathers them again, and reduces the block's gradient
before it continues with the next block. Compiled code never waits for another rank.

A callback inside one compiled pass would not work. XLA chooses when it runs and which arrays are
alive then, and its errors lose their type. If JAX has only one thread, as on one core, a callback
with large arrays hangs.

Weights outside the blocks (an embedding, a head, a weight of several blocks, a model without
blocks) form one more unit. It stays gathered during the passes of a step. Source: Rajbhandari et
al. 2020, arXiv:1910.02054, section 5.3; Zhao et al. 2023, arXiv:2304.11277.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.metrics import Sums
from hvdtrain.extras.fully_sharded.jax.segments import CutPass, Programs, Segment, Variables, mark
from hvdtrain.frameworks.jax.layers import Params
from hvdtrain.frameworks.jax.model import JaxDevice, JaxModel, key_data
from hvdtrain.frameworks.jax.norm import NormRanks
from hvdtrain.frameworks.jax.parts import CutUnits, ShardedUnit, in_one_row
from hvdtrain.frameworks.jax.step import Formulas, Gradient, PaddedBatch, Phases, Weights

REST = 0  # the unit of weights outside the blocks


def block_passes(model: JaxModel, part: Any, averaging: Any, *arguments: Any) -> BlockPasses:
    """Returns the passes of a model. part: of its task; averaging: of views; arguments: the
    others of BlockPasses."""
    return BlockPasses(Formulas(with_marked_blocks(model), part, averaging), *arguments)


def with_marked_blocks(model: JaxModel) -> JaxModel:
    """Returns the model with blocks marked for tracing, if its function has a parameter `wrap`."""
    apply = model.functions.apply
    if "wrap" not in inspect.signature(apply).parameters:
        return model
    return model._replace(
        functions=model.functions._replace(apply=functools.partial(apply, wrap=mark))
    )


class Units:
    """The units of a model: the rest, then its blocks, and which parameters each has."""

    def __init__(
        self, training: CutPass, shapes: Sequence[tuple[int, ...]], communicator: Communicator
    ) -> None:
        """training: a pass of any batch."""
        users: dict[int, set[int | None]] = {i: set() for i in range(len(shapes))}
        for segment in training.segments:
            for i in segment.parameters:
                users[i].add(segment.block)
        blocks = sorted(
            {segment.block for segment in training.segments if segment.block is not None}
        )
        self._number: dict[int | None, int] = {
            block: number for number, block in enumerate(blocks, start=1)
        }
        self.of_parameter = [
            self._number.get(used.pop(), REST) if len(used) == 1 else REST
            for used in users.values()
        ]
        members = [
            [i for i, unit in enumerate(self.of_parameter) if unit == number]
            for number in range(len(blocks) + 1)
        ]
        self.cut = CutUnits(shapes, members, communicator.rank, communicator.size)
        share = 1 - self.cut.units[REST].cut.length / self.cut.length
        self.summary = (
            f" in {len(blocks)} block{'s' if len(blocks) > 1 else ''} with {share:.1%} of them, "
            "and the rest"
        )
        if not any(members[1:]):
            self.summary = " as one unit: the model shows no blocks"

    def needed_by(self, segment: Segment) -> list[int]:
        return sorted({self.of_parameter[i] for i in segment.parameters})

    def unit_of(self, segment: Segment) -> int:
        """Returns the unit whose gradient the segment computes."""
        return self._number.get(segment.block, REST)


class WholeUnits:
    """The gathered weights of the units that passes need: of the rest, and of the block that was
    requested last."""

    def __init__(
        self, cut: CutUnits, communicator: Communicator, target: JaxDevice, keeps_all: bool
    ) -> None:
        """keeps_all: weights of blocks are kept until drop()."""
        self._cut = cut
        self._communicator = communicator
        self._target = target
        self._keeps_all = keeps_all
        self._parts: Weights | None = None  # the parts that the gathered weights belong to
        self._found: dict[int, Weights] = {}

    def weights_of(self, number: int, parts: Weights) -> Weights:
        """Returns the gathered weights of a unit. A collective, unless the unit is already
        gathered, which is the same on all ranks."""
        if parts is not self._parts:
            self._parts = parts
            self._found = {}
        if number not in self._found:
            if number != REST and not self._keeps_all:
                self._found = {REST: self._found[REST]} if REST in self._found else {}
            self._found[number] = self.gather(number, parts)
        return self._found[number]

    def gather(self, number: int, parts: Weights) -> Weights:
        unit = self._cut.units[number]
        if not unit.parameters:
            return []
        # new: the weights on a CPU may be views of it
        row = np.empty(unit.cut.length, self._target.dtype)
        np.concatenate([np.asarray(parts[i]) for i in unit.parameters], out=row[unit.cut.own])
        row = self._communicator.start_spread(row, f"weights.{number}").wait()
        return [self._target.to_device(array) for array in unit.cut.split(row)]

    def drop(self, number: int) -> None:
        self._found.pop(number, None)

    def drop_all(self) -> None:
        self._parts = None
        self._found = {}


class BlockPasses:
    """Forward and backward passes of a model with sharded weights: each rank has a part (n,) of
    every weight. Each pass is a collective.

    A rank without samples computes nothing and returns zeros; if synchronized norms wait for it, it
    computes one row of padding.
    """

    are_collective = True

    def __init__(
        self,
        formulas: Formulas,
        shapes: Sequence[tuple[int, ...]],
        buffers: Params,
        padding: dict[str, jax.Array],
        communicator: Communicator,
        target: JaxDevice,
        phases: Phases,
        reshards: bool,
    ) -> None:
        """formulas: for a model with_marked_blocks(); padding: a batch of one row."""
        self.formulas = formulas
        self.communicator = communicator
        self.target = target
        self.phases = phases
        self.norm_ranks: NormRanks | None = formulas.model.norms.ranks
        self.programs = Programs()
        self._passes = dict[Any, CutPass]()
        self._like = [jax.ShapeDtypeStruct(shape, target.dtype) for shape in shapes]
        with target.enable_x64():
            arguments = self._on_device(buffers, PaddedBatch(0, 0, padding), 1, key_data(0))
            self.units = Units(self._cut(formulas.loss, arguments), shapes, communicator)
        self.cut = self.units.cut
        self.whole = WholeUnits(self.cut, communicator, target, keeps_all=not reshards)

    def gradient(
        self, weights: Weights, buffers: Params, batch: PaddedBatch, divisor: float, key: np.ndarray
    ) -> Gradient:
        """Like Formulas.gradient(), except that the row is this rank's part of the sum over ranks.
        Without samples there are no sums."""
        arguments = self._on_device(buffers, batch, divisor, key)
        cut = self._cut(self.formulas.loss, arguments)
        computes = batch.n > 0 or self.norm_ranks is not None
        training = TrainingPass(self, weights, cut, arguments if computes else None)
        *before, last = cut.segments
        for segment in before:
            training.forward(segment)
        training.turn(last)
        for segment in reversed(before):
            training.backward(segment)
        training.reduce_rest()
        if training.variables is None:
            return Gradient(training.row(), {}, buffers)
        _, (sums, changed, _) = cut.results(training.variables)
        return Gradient(training.row(), sums, changed)

    def sums(self, weights: Weights, buffers: Params, batch: PaddedBatch) -> Sums:
        """Returns the sums in evaluation; empty without samples."""
        return self._evaluate(self.formulas.sums, weights, buffers, batch) or {}

    def outputs(self, weights: Weights, buffers: Params, batch: PaddedBatch) -> Any:
        """Returns the model's outputs (rows, ...) in evaluation; (0,) without samples."""
        found = self._evaluate(self.formulas.outputs, weights, buffers, batch)
        return np.zeros(0, self.target.dtype) if found is None else found

    def all_weights(self, weights: Weights) -> Weights:
        """Returns the gathered arrays of all parameters."""
        found: dict[int, jax.Array] = {}
        for number, unit in enumerate(self.cut.units):
            found |= zip(unit.parameters, self.whole.gather(number, weights), strict=True)
        return [found[i] for i in range(len(weights))]

    def release(self) -> None:
        """Drops gathered weights, because the parts will change."""
        self.whole.drop_all()

    def weights_for(self, segment: Segment, parts: Weights) -> Weights:
        """Returns the gathered weights that a segment reads, in its order."""
        found: dict[int, jax.Array] = {}
        for number in self.units.needed_by(segment):
            found |= zip(
                self.cut.units[number].parameters, self.whole.weights_of(number, parts), strict=True
            )
        return [found[i] for i in segment.parameters]

    def _evaluate(
        self, function: Callable[..., Any], parts: Weights, buffers: Params, batch: PaddedBatch
    ) -> Any:
        arguments = self._on_device(buffers, batch)
        cut = self._cut(function, arguments)
        variables = cut.begin(arguments) if batch.n else None
        self.whole.weights_of(REST, parts)
        for number, segment in enumerate(cut.segments):
            weights = self.weights_for(segment, parts)
            if variables is not None:
                inputs = [variables[v] for v in segment.inputs]
                found = self.programs.run((segment, "forward"), segment.forward, weights, inputs)
                variables |= zip(segment.outputs, found, strict=True)
                _forget(variables, cut, number)
        return None if variables is None else cut.results(variables)

    def _cut(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> CutPass:
        """Returns the function traced for the shapes of these arguments."""
        leaves, tree = jax.tree.flatten(arguments)
        key = function.__name__, tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        if key not in self._passes:
            self._passes[key] = CutPass(function, self._like, arguments)
        return self._passes[key]

    def _on_device(self, *arguments: Any) -> tuple[Any, ...]:
        """Converts numbers to arrays, because compiled functions only take arrays."""
        return jax.tree.map(
            lambda x: x if isinstance(x, jax.Array) else self.target.to_device(np.asarray(x)),
            arguments,
        )


def _forget(variables: Variables, cut: CutPass, number: int) -> None:
    """Drops variables that no later segment reads."""
    later = {v for segment in cut.segments[number + 1 :] for v in segment.inputs}
    for v in cut.segments[number].inputs:
        if v not in later and not cut.is_result(v):
            del variables[v]


class TrainingPass:
    """One pass in training, forward and backward. Arrays between segments stay until backward has
    used them."""

    def __init__(
        self, passes: BlockPasses, parts: Weights, cut: CutPass, arguments: tuple[Any, ...] | None
    ) -> None:
        """arguments: None on a rank that computes nothing and only takes part in the
        collectives."""
        self._passes = passes
        self._parts = parts
        self._cut = cut
        self.variables = None if arguments is None else cut.begin(arguments)
        self._cotangents: Variables = {}
        self._of_rest: dict[int, jax.Array] = {}  # number of a parameter -> its gradient so far
        self._rows: dict[int, jax.Array] = {}  # unit -> its gradient so far
        self._own: dict[
            int, np.ndarray
        ] = {}  # number of a parameter -> this rank's part of the sum over ranks
        self._finite: Any = None
        self._gather(lambda: passes.whole.weights_of(REST, parts))

    def forward(self, segment: Segment) -> None:
        weights = self._weights(segment)
        if self.variables is not None:
            self._store(
                segment,
                self._run(segment, "forward", segment.forward, weights, self._inputs(segment)),
            )

    def turn(self, last: Segment) -> None:
        """Computes the last segment, forward and backward."""
        weights = self._weights(last)
        if self.variables is None:
            return
        outputs, gradients, carried = self._run(
            last, "both", last.both, weights, self._inputs(last)
        )
        self._store(last, outputs)
        _, (_, _, self._finite) = self._cut.results(self.variables)
        self._add_to_rest(last.parameters, gradients)
        self._add_cotangents(last, carried)

    def backward(self, segment: Segment) -> None:
        number = self._passes.units.unit_of(segment)
        if segment.wanted:
            weights = self._weights(segment)
            if self.variables is not None:
                self._pull(segment, number, weights)
        if number != REST and self._is_first(segment):
            if number > 1:  # the next pass begins with the first block
                self._passes.whole.drop(number)
            self._reduce(number, self._rows.pop(number, None))

    def reduce_rest(self) -> None:
        unit = self._passes.cut.units[REST]
        row = None
        if self.variables is not None and unit.parameters:
            whole = self._passes.whole.weights_of(REST, self._parts)
            found = [self._of_rest.pop(i, None) for i in unit.parameters]
            gradients = [
                jnp.zeros_like(p) if g is None else g for g, p in zip(found, whole, strict=True)
            ]
            row = self._passes.programs.run("rest", _row, gradients, self._finite)
        self._reduce(REST, row)

    def row(self) -> jax.Array:
        """Returns this rank's parts of the gradients of all parameters, concatenated."""
        return self._passes.target.to_device(
            np.concatenate([self._own[i] for i in range(len(self._parts))])
        )

    def _pull(self, segment: Segment, number: int, weights: Weights) -> None:
        assert self.variables is not None
        cotangents = [self._cotangents.pop(segment.outputs[i]) for i in segment.wanted]
        unit = self._passes.cut.units[number]
        backward = functools.partial(_backward, segment, unit if number != REST else None)
        row, gradients, carried = self._run(
            segment, "backward", backward, weights, self._inputs(segment), cotangents, self._finite
        )
        for v in segment.outputs:
            if not self._cut.is_result(v):
                self.variables.pop(v)
        if row is not None:
            self._rows[number] = self._rows[number] + row if number in self._rows else row
        self._add_to_rest(
            [i for i in segment.parameters if self._passes.units.of_parameter[i] == REST], gradients
        )
        self._add_cotangents(segment, carried)

    def _is_first(self, segment: Segment) -> bool:
        """Whether no earlier segment, which backward computes later, is the same block."""
        return segment is next(each for each in self._cut.segments if each.block == segment.block)

    def _weights(self, segment: Segment) -> Weights:
        return self._gather(lambda: self._passes.weights_for(segment, self._parts))

    def _gather(self, gather: Callable[[], Weights]) -> Weights:
        self._passes.phases.enter("communication")
        weights = gather()
        self._passes.phases.enter("compute")
        return weights

    def _inputs(self, segment: Segment) -> list[Any]:
        assert self.variables is not None
        return [self.variables[v] for v in segment.inputs]

    def _run(
        self, segment: Segment, kind: str, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        result = self._passes.programs.run((segment, kind), function, *arguments)
        if self._passes.norm_ranks:  # their collectives end before the next one of this thread
            jax.block_until_ready(result)
            self._passes.norm_ranks.raise_error()
        return result

    def _store(self, segment: Segment, outputs: list[Any]) -> None:
        assert self.variables is not None
        self.variables |= zip(segment.outputs, outputs, strict=True)

    def _add_to_rest(self, parameters: Sequence[int], gradients: Sequence[Any]) -> None:
        for i, gradient in zip(parameters, gradients, strict=True):
            self._of_rest[i] = self._of_rest[i] + gradient if i in self._of_rest else gradient

    def _add_cotangents(self, segment: Segment, carried: Sequence[Any]) -> None:
        carrying = [
            v for v, carries in zip(segment.inputs, segment.carries, strict=True) if carries
        ]
        for v, cotangent in zip(carrying, carried, strict=True):
            self._cotangents[v] = (
                self._cotangents[v] + cotangent if v in self._cotangents else cotangent
            )

    def _reduce(self, number: int, row: jax.Array | None) -> None:
        """Keeps this rank's part of the sum over ranks of a unit's gradient; row: None if this
        rank has no samples."""
        unit = self._passes.cut.units[number]
        passes = self._passes
        if not unit.parameters:
            return
        # the host waits for the device here
        on_host = np.zeros(unit.cut.length, passes.target.dtype) if row is None else np.asarray(row)
        passes.phases.enter("communication")
        part = passes.communicator.start_reduce_scatter(on_host, f"gradient.{number}").wait()
        passes.phases.enter("compute")
        # a copy, because it may be a view of the whole array
        own = np.split(np.array(part), np.cumsum(unit.cut.lengths)[:-1])
        self._own |= zip(unit.parameters, own, strict=True)


def _backward(
    segment: Segment,
    unit: ShardedUnit | None,
    weights: Weights,
    inputs: list[Any],
    cotangents: list[Any],
    finite: Any,
) -> tuple[jax.Array | None, list[Any], list[Any]]:
    """Returns the gradients of a block's parameters in one row, of other weights in order, and of
    the block's inputs."""
    found, carried = segment.backward(weights, inputs, cotangents)
    gradients = dict(zip(segment.parameters, found, strict=True))
    if unit is None:
        return None, found, carried
    own = [gradients.pop(i, None) for i in unit.parameters]
    arrays = [
        jnp.zeros(shape, cotangents[0].dtype) if g is None else g
        for g, shape in zip(own, unit.cut.shapes, strict=True)
    ]
    return _row(arrays, finite) if arrays else None, list(gradients.values()), carried


def _row(gradients: list[Any], finite: Any) -> jax.Array:
    """Returns the gradients in one row; NaN if a loss is not finite, which the reduction passes on
    to every rank."""
    return jnp.where(finite, in_one_row(gradients), jnp.nan)
