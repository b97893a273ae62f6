"""JaxLearner: one rank's model in JAX. Batches are padded to a few shapes, for which functions are
compiled."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import same_on_all_ranks
from hvdtrain.config.plugins import named
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import (
    ArrayInFile,
    Arrays,
    ArrayStream,
    Batch,
    Piece,
    as_stream,
    digests,
    elements,
)
from hvdtrain.core.extras import implementing_module
from hvdtrain.core.metrics import Sums, host_value, zero_sums
from hvdtrain.core.progress import Hyper, fold
from hvdtrain.data.images import augment
from hvdtrain.data.images.averaging import averaging_of
from hvdtrain.data.source import Source
from hvdtrain.features.shards import fully_sharded
from hvdtrain.frameworks.by_name import build_rule, is_made_with_the_model
from hvdtrain.frameworks.jax import task_parts
from hvdtrain.frameworks.jax.layers import Params
from hvdtrain.frameworks.jax.model import JaxDevice, JaxModel, device_dtype, key_data
from hvdtrain.frameworks.jax.step import (
    AnyOptimizer,
    Formulas,
    LearnerPasses,
    Optimizer,
    PaddedBatch,
    Phases,
    WholePasses,
)
from hvdtrain.frameworks.jax.strategy import JaxStrategy, Replicated, whole_piece
from hvdtrain.frameworks.jax.user_optimizer import UserOptimizer
from hvdtrain.frameworks.jax.zero import JaxZeroStrategy
from hvdtrain.frameworks.learner import (
    MADE_BY,
    Gpu,
    Learner,
    Predictions,
    check_fit,
    check_maker,
    gather,
    global_weight,
    plain_names,
)
from hvdtrain.frameworks.stopwatch import HostStopwatch, Stopwatch
from hvdtrain.tasks.task import DeviceAndDtype, Task, counts_exactly, part_of

_DROPOUT = 0x64726F70  # a stream of counters, distinct from the streams of other random numbers


class JaxLearner(Learner):
    """A JAX model of samples (n, ...), each sample by itself: batches are padded with copies."""

    def __init__(
        self,
        config: Config,
        model: JaxModel,
        optimizer: AnyOptimizer,
        task: Task,
        communicator: Communicator,
        target: JaxDevice,
    ) -> None:
        self.task = task
        self.communicator = communicator
        self.target = target
        self.data = self.readers = communicator
        if config.shard.stage == 3:  # otherwise a rank could have parts of different weights
            model = model._replace(start=_as_on_rank_0(communicator, model.start))
        self.model = model._replace(start=[])  # frees their memory after the first step
        self.notes = model.functions.notes  # lines for the header
        # auto was rejected before
        micro = config.batch.micro if isinstance(config.batch.micro, int) else None
        self.largest = largest_micro_batch(config.batch.size, micro, communicator.size)
        self.stopwatch: Stopwatch = HostStopwatch()
        self._has_averages = config.optim.averages
        self._skips = config.guard.nonfinite == "skip"
        self._phases = Phases(
            self.stopwatch, communicates=communicator.size > 1, waits=config.log.step_times
        )
        self.waits_only_in_communication = self._phases.are_timed and model.norms.ranks is None
        start = model.norms.start()
        self.buffers = {
            name: target.to_device(b if b.dtype.kind == "i" else b.astype(target.dtype))
            for name, b in start.items()
        }
        with target.enable_x64():
            part = part_of(task, "jax", config, DeviceAndDtype(target.dtype, parts=task_parts))
            averaging = averaging_of(config, task.fields)
        self._counts_exactly = counts_exactly(part)
        # of Task.gathered; each() is compiled and cannot return them
        self._parts_of = getattr(part, "parts_of", None) if task.gathered else None
        self._passes: LearnerPasses
        self._strategy: JaxStrategy
        if config.shard.stage == 3:
            passes = named(fully_sharded(config).BLOCK_PASSES)(
                self.model,
                part,
                averaging,
                *(
                    optimizer.shapes,
                    self.buffers,
                    self._row_of_padding(),
                    communicator,
                    target,
                    self._phases,
                    config.shard.reshard,
                ),
            )
            in_units = passes.units.summary
            self._strategy = JaxZeroStrategy(
                config, model, optimizer, communicator, target, self._phases, passes.cut, in_units
            )
            self._passes = passes
        else:
            strategy = JaxZeroStrategy if config.shard.stage else Replicated
            self._strategy = strategy(config, model, optimizer, communicator, target, self._phases)
            self._passes = WholePasses(Formulas(self.model, part, averaging), target.everywhere)
        self.is_sharded = self._strategy.is_sharded
        self._optimizer = optimizer
        self._zero = target.to_device(np.zeros((), target.dtype))
        self.weights = self._strategy.start_weights(model.start)

    def cache_on_device(self, source: Source) -> bool:
        return False

    def to_device(self, batch: Batch) -> PaddedBatch:
        n = len(next(batch[name] for name in self.task.fields))
        if n == 0:
            return PaddedBatch(
                0,
                0,
                self._row_of_padding()
                if self.model.norms.ranks or self._passes.are_collective
                else {},
            )
        weight = self.task.weight(batch)
        batch = augment.augment_batch(batch)
        padding = rows_for(n, self.largest, 1 + len(self.target.others)) - n
        dtypes = {
            name: device_dtype(field, self.target.dtype) for name, field in self.task.fields.items()
        }
        dtypes |= {f"partner_{name}": dtype for name, dtype in dtypes.items()} | {
            "mixup_weight": self.target.dtype
        }
        padded = {
            name: _pad(batch[name].astype(dtype), padding)
            for name, dtype in dtypes.items()
            if name in batch
        }
        arrays = {name: self.target.rows_to_devices(array) for name, array in padded.items()}
        sample_weights = np.concatenate([batch.get("w", np.ones(n)), np.zeros(padding)]).astype(
            self.target.dtype
        )
        return PaddedBatch(n, weight, arrays | {"w": self.target.rows_to_devices(sample_weights)})

    def _row_of_padding(self) -> dict[str, jax.Array]:
        """Returns a batch of padding, for ranks without samples and for tracing."""
        arrays = {
            name: np.zeros((1, *field.shape), device_dtype(field, self.target.dtype))
            for name, field in self.task.fields.items()
        }
        return {
            name: self.target.to_device(array)
            for name, array in (arrays | {"w": np.zeros(1, self.target.dtype)}).items()
        }

    def step(self, micro: Sequence[PaddedBatch], hyper: Hyper, seed: int) -> Sums:
        sums = zero_sums(self.task.sums)
        buffers = self.buffers
        divisor = global_weight(
            self.task, sum(batch.weight for batch in micro), hyper.batch, self.communicator
        )
        self._phases.begin()
        with self.target.enable_x64():
            for number, batch in enumerate(micro):
                key = key_data(fold(seed, _DROPOUT, self.communicator.rank, number))
                sums = _add(sums, self._one_pass(batch, divisor, key), batch.n)
        self._passes.release()
        self.weights, nonfinite, squares = self._strategy.update(self.weights, hyper, seed)
        if self._skips and buffers:
            with self.target.enable_x64():
                self.buffers = jax.tree.map(
                    functools.partial(jnp.where, nonfinite > 0), buffers, self.buffers
                )
        self._phases.wait_for(self.weights)
        self._phases.enter("")
        if squares:
            with self.target.enable_x64():
                found = implementing_module("log.noise_scale").noise_sums(
                    squares.own, squares.mean, sums["count"], hyper.batch, self.communicator.size
                )
                sums |= {key: jnp.where(nonfinite > 0, 0.0, value) for key, value in found.items()}
        return self._host_float64(sums | {"nonfinite": nonfinite})

    def _one_pass(self, batch: PaddedBatch, divisor: float, key: np.ndarray) -> Sums:
        """Returns the sums of a micro-batch, and passes its gradient to the strategy."""
        if not batch.arrays:
            self._strategy.add(None)
            return {}
        norms = self.model.norms
        if batch.n:
            norms.check(batch.n)
        found = self._passes.gradient(self.weights, self.buffers, batch, divisor, key)
        if norms.ranks:
            jax.block_until_ready(found)
            norms.ranks.raise_error()
        self.buffers = found.buffers
        self._strategy.add(found.row)
        return found.sums

    def trains_one_sample(self) -> bool:
        return self.model.norms.takes(1)

    def sync_buffers(self, communicator: Communicator) -> None:
        """Averages running statistics over ranks and copies counts of updates from the first rank.
        Weights are already equal."""
        if communicator.size == 1 or not self.buffers:
            return
        arrays = {name: np.asarray(array) for name, array in self.buffers.items()}
        counts = {name: array for name, array in arrays.items() if array.dtype.kind == "i"}
        running = {name: array for name, array in arrays.items() if name not in counts}
        flat = communicator.allreduce(
            np.concatenate([array / communicator.size for array in running.values()]), "settle"
        )
        numbers = communicator.broadcast(np.stack(list(counts.values())), "settle.others")
        means = np.split(flat, np.cumsum([len(array) for array in running.values()])[:-1])
        found = dict(zip(running, means, strict=True)) | dict(zip(counts, numbers, strict=True))
        self.buffers = {name: self.target.to_device(np.array(found[name])) for name in self.buffers}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        weights = self.weights
        try:
            if self._has_averages and all(
                float(state[-1]) > 0 for state in self._strategy.optimizer_state
            ):
                self.weights = self._strategy.put_together(
                    [state[-2] for state in self._strategy.optimizer_state]
                )
            yield
        finally:
            self.weights = weights

    def evaluate(self, batch: PaddedBatch) -> Sums:
        if not batch.n and not self._passes.are_collective:
            return zero_sums(self.task.sums)
        outputs = self._outputs(batch) if self._parts_of is not None else None
        return self._evaluated(batch) | self._parts(outputs, batch)

    def _evaluated(self, batch: PaddedBatch) -> Sums:
        with self.target.enable_x64():
            found = self._passes.sums(self.weights, self.buffers, batch)
            if not self._counts_exactly:
                return self._host_float64(_add(zero_sums(self.task.sums), found, batch.n))
        return (
            zero_sums(self.task.sums)
            | {name: host_value(value) for name, value in found.items()}
            | {"count": batch.n}
        )

    def _outputs(self, batch: PaddedBatch) -> np.ndarray:
        with self.target.enable_x64():
            return np.asarray(self._passes.outputs(self.weights, self.buffers, batch))[: batch.n]

    def _parts(self, outputs: np.ndarray | None, batch: PaddedBatch) -> Sums:
        """Returns the values to gather of a batch, from its outputs on the host."""
        if self._parts_of is None or outputs is None or not batch.n:
            return {}
        parts: Sums = self._parts_of(outputs, batch.arrays["y"][: batch.n])
        return parts

    def predict(self, batch: PaddedBatch) -> Predictions:
        outputs = self._outputs(batch)
        if not batch.n and not self._passes.are_collective:
            return Predictions(outputs, zero_sums(self.task.sums))
        return Predictions(outputs, self._evaluated(batch) | self._parts(outputs, batch))

    def whole_weights(self) -> list[jax.Array]:
        """Returns the full weights in the order of the model's names. A collective."""
        return self._passes.all_weights(self.weights)

    def tree(self) -> Params:
        """Returns the full parameters in the structure of init(). A collective."""
        with self.target.enable_x64():
            return self.model.tree(self.whole_weights())

    def state(self, *, is_kept: bool = True) -> Arrays:
        return gather(self.communicator, self.pieces(), is_kept=is_kept)

    def pieces(self) -> Iterator[Piece]:
        pairs = enumerate(zip(self.model.names, self.weights, strict=True))
        yield from (self._strategy.weight(f"p.{name}", number, p) for number, (name, p) in pairs)
        yield from (whole_piece(f"b.{name}", b) for name, b in self.buffers.items())
        parameters = len(self.model.names)
        for number, (names, state) in enumerate(self._named_state()):
            for name, array in zip(names, state, strict=True):
                yield (
                    self._strategy.piece(name, number, array)
                    if number < parameters
                    else whole_piece(name, array)
                )
        if self._optimizer.made_by:
            yield whole_piece(MADE_BY + self._optimizer.made_by, self._zero)

    def state_dict_names(self) -> dict[str, str]:
        ties = {name: f"p.{of}" for name, of in self.model.functions.ties.items()}
        return (
            plain_names(
                [
                    *(f"p.{name}" for name in self.model.names),
                    *(f"b.{name}" for name in self.buffers),
                ]
            )
            | ties
        )

    def load(self, state: Arrays | ArrayStream) -> None:
        live = {piece.name: piece for piece in self.pieces()}
        stream = as_stream(state)
        check_maker(self._optimizer.made_by, stream.shapes)
        check_fit(
            {name: piece.shape for name, piece in live.items()}, stream.shapes, stream.is_partial
        )
        loaded = {name: self._part_on_device(live[name], array) for name, array in stream.arrays}
        names = self.model.names
        self.weights = [
            loaded.get(f"p.{name}", old) for name, old in zip(names, self.weights, strict=True)
        ]
        self.buffers = {name: loaded.get(f"b.{name}", old) for name, old in self.buffers.items()}
        self._strategy.optimizer_state = [
            tuple(loaded.get(name, old) for name, old in zip(names, state, strict=True))
            for names, state in self._named_state()
        ]

    def _named_state(self) -> Iterator[tuple[list[str], tuple[jax.Array, ...]]]:
        """Yields the optimizer state of each parameter, then the state that belongs to no
        parameter, each with the names of its arrays."""
        state = self._strategy.optimizer_state
        return zip(self._optimizer.state_names(state), state, strict=True)

    def _part_on_device(self, piece: Piece, array: np.ndarray | ArrayInFile) -> jax.Array:
        """Returns this rank's part of a full array on the device; the caller keeps the memory of
        `array`."""
        part = array if piece.is_whole else elements(array, piece.cut, piece.start, piece.stop)
        return self.target.to_device(np.array(part, piece.dtype))

    def describe(self) -> str:
        device = f"{self.target.device.platform}:{self.target.device.id}" + "".join(
            f"+{other.id}" for other in self.target.others
        )
        count = sum(math.prod(shape) for shape in self._optimizer.shapes)
        return (
            f"{self.model.title}, {count:,} parameters, jax {self.target.dtype} on {device}, "
            f"{self._strategy.summary}{self._on_their_way}"
        )

    @property
    def _on_their_way(self) -> str:
        """Describes how data of a GPU reach other ranks, for the header."""
        return (
            ", through host memory"
            if self.target.device.platform != "cpu" and self.communicator.size > 1
            else ""
        )

    def gpu(self) -> Gpu | None:
        device = self.target.device
        if device.platform == "cpu":
            return None
        why = "JAX does not report the identity of the GPU"
        return Gpu(
            "",
            why,
            device.device_kind,
            lambda: (device.memory_stats() or {}).get("peak_bytes_in_use", 0),
        )

    def profile(self, path: Path) -> AbstractContextManager[None]:
        return jax.profiler.trace(str(path), create_perfetto_trace=True)

    def _host_float64(self, sums: Sums) -> Sums:
        """Converts float64 sums to Python floats, because outside of enable_x64() JAX would add
        them as float32."""
        if self.target.dtype != np.float64:
            return sums
        return {
            name: tuple(np.asarray(value).tolist()) if np.ndim(value) else float(value)
            for name, value in sums.items()
        }


def make_optimizer(config: Config, model: JaxModel) -> AnyOptimizer:
    """Creates the optimizer of optim.name: a rule of hvdtrain, or a function of optax or the
    user's.

    Raises UserError if shard.stage needs one that is elementwise.
    """
    shapes = [p.shape for p in model.start]
    if not is_made_with_the_model(config):
        return Optimizer(config, build_rule(config), model.names, shapes)
    user_optimizer = UserOptimizer(config, model.names, shapes, model.structure)
    if config.shard.stage:
        user_optimizer.check_elementwise()
    return user_optimizer


def _as_on_rank_0(communicator: Communicator, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns rank 0's arrays. If ranks have computed the same numbers from one seed, they exchange
    only digests. A collective."""
    numbers = digests((str(index), array) for index, array in enumerate(arrays))
    is_same = same_on_all_ranks(communicator, list(numbers.values()))
    return [
        array
        if same or not array.size
        else communicator.broadcast(array.reshape(-1), "weights.start").reshape(array.shape)
        for array, same in zip(arrays, is_same, strict=True)
    ]


def largest_micro_batch(batch: int, micro: int | None, size: int) -> int:
    """Returns the size of a rank's largest micro-batch for the current global batch."""
    share = -(-batch // size)
    return -(-share // -(-share // (micro or share)))


def rows_for(n: int, largest: int, devices: int = 1) -> int:
    """Returns the number of rows, with padding, for n samples. It depends only on n, so that a
    resumed job computes the same as an uninterrupted one.

    It has few values, because each is compiled. A little less than `largest` becomes `largest`; any
    other n is rounded up to one of 8 values per doubling. Each device gets the same number of rows.
    """
    step = max(1, 1 << n.bit_length() >> 4)
    rows = largest if largest - max(1, largest // 8) <= n <= largest else -(-n // step) * step
    return -(-rows // devices) * devices


def _pad(array: np.ndarray, padding: int) -> np.ndarray:
    """Appends the last row `padding` times, so that outputs for the padding are finite if outputs
    for the data are."""
    return np.concatenate([array, np.repeat(array[-1:], padding, axis=0)]) if padding else array


def _add(sums: Sums, more: Sums, samples: int) -> Sums:
    return (
        sums
        | {name: sums[name] + value for name, value in more.items()}
        | {"count": sums["count"] + samples}
    )
