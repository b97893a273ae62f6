"""A torch learner's state as named arrays: weights, buffers, optimizer state and loss scale, and
their copy from a GPU to the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import torch

from hvdtrain.comm.staging import KINDS
from hvdtrain.core.arrays import ArrayInFile, Arrays, ArrayStream, Piece, as_stream
from hvdtrain.frameworks.learner import Shapes, check_fit
from hvdtrain.frameworks.torch.device_digest import sum_of_bytes
from hvdtrain.frameworks.torch.optim import rule_optimizer
from hvdtrain.frameworks.torch.optim.rule_optimizer import RuleOptimizer
from hvdtrain.frameworks.torch.precision import Scale, load_loss_scale, without_loss_scale
from hvdtrain.frameworks.torch.strategy import Shard, Strategy, StrategyTensor


class LearnerState:
    """The live tensors of a model, its optimizer and its loss scale."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scale: Scale,
        strategy: Strategy,
        is_first_replica: bool = True,
        *,
        hashes_on_device: bool = False,
        trained: Iterable[torch.nn.Parameter] | None = None,
    ) -> None:
        """is_first_replica: no lower rank has the same parts. hashes_on_device: all ranks compute
        digests of GPU tensors on the GPU. trained: the parameters with optimizer state; None: those
        that require a gradient at the time."""
        self._is_first_replica = is_first_replica
        self._hashes_on_device = hashes_on_device
        self._model = model
        self._optimizer = optimizer
        self._scale = scale
        self._strategy = strategy
        # with shard.stage=3 the model has other parameters during a pass
        self._parameters = dict(model.named_parameters())
        self._always_trained = None if trained is None else set(trained)
        self._staging = StagingBuffer()

    def pieces(self) -> Iterator[Piece]:
        """Yields pieces of the state: Learner.pieces()."""
        shards = {f"s.{name}": shard for name, shard in self._trained()}
        held = {f"p.{name}": self._strategy.part(p) for name, p in self._parameters.items()}
        in_parts = {name: shard for name, shard in (held | shards).items() if not shard.is_whole}
        tensors = self.tensors()
        of_strategy = [own.tensor for own in self._of_strategy().values()]
        self._staging.expect([*tensors.values(), *of_strategy])
        for name, tensor in tensors.items():
            dtype = numpy_type(tensor.dtype)
            read = functools.partial(self._staging.read, tensor)
            shard = (
                (in_parts.get(name) or in_parts.get(name.rpartition(".")[0])) if in_parts else None
            )
            if shard is not None and tensor.shape == shard.parameter.shape:
                is_mine = self._is_first_replica and shard.is_mine
                flat = functools.partial(self._read_flat, tensor)
                yield Piece(
                    name,
                    shard.shape,
                    shard.start,
                    shard.stop,
                    dtype,
                    flat,
                    False,
                    is_mine,
                    shard.cut,
                    self._hash_of(tensor),
                )
            else:
                found = Piece(name, tuple(tensor.shape), 0, tensor.numel(), dtype, read, True)
                yield found._replace(hash_in_place=self._hash_of(tensor))
        for name, own in self._of_strategy().items():
            yield self._piece_of_strategy(name, own)

    def _of_strategy(self) -> dict[str, StrategyTensor]:
        return {f"s.{name}": own for name, own in self._strategy.tensors().items()}

    def _piece_of_strategy(self, name: str, own: StrategyTensor) -> Piece:
        tensor = own.tensor
        size = tensor.numel()
        is_whole = own.ranks <= 1
        return Piece(
            name,
            own.shape,
            own.rank * size,
            (own.rank + 1) * size,
            numpy_type(tensor.dtype),
            lambda: self._staging.read(tensor).reshape(own.shape if is_whole else -1),
            is_whole,
            is_mine=not is_whole and self._is_first_replica,
            hash_in_place=self._hash_of(tensor),
            is_of_ranks=bool(own.ranks),
        )

    def _hash_of(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        if self._hashes_on_device and not self._staging.is_on_host(tensor):
            return functools.partial(sum_of_bytes, tensor)
        return None

    def _read_flat(self, tensor: torch.Tensor) -> np.ndarray:
        return self._staging.read(tensor).reshape(-1)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns every live tensor that a resume needs, by the names of Learner.state(); for
        divided arrays, this rank's part."""
        tensors: dict[str, torch.Tensor] = {
            f"p.{name}": self._strategy.part(p).parameter for name, p in self._parameters.items()
        }
        tensors |= {f"b.{name}": b for name, b in self._model.named_buffers()}
        optimizer_state = {
            f"s.{name}.{key}": tensor
            for name, shard in self._trained()
            for key, tensor in rule_optimizer.optimizer_state(
                self._optimizer, shard.parameter
            ).items()
        }
        if optimizer_state:
            optimizer_state |= rule_optimizer.class_entry(self._optimizer)
        return tensors | optimizer_state | self._scale.tensors

    def state_dict_names(self) -> dict[str, str]:
        """Learner.state_dict_names()."""
        ours = {id(p): f"p.{name}" for name, p in self._parameters.items()}
        ours |= {id(b): f"b.{name}" for name, b in self._model.named_buffers()}
        # buffers that are not persistent are not in it
        theirs = self._model.state_dict(keep_vars=True)
        return {name: ours[id(tensor)] for name, tensor in theirs.items() if id(tensor) in ours}

    def load(self, state: Arrays | ArrayStream) -> list[str]:
        """Loads a state: Learner.load(). Returns lines for the user. Raises UserError if the state
        is of another model or another class of optimizer."""
        stream = as_stream(state)
        loading = self.loading(stream.shapes, is_partial=stream.is_partial)
        for name, array in stream.arrays:
            loading.take(name, array)
        return loading.finish()

    def loading(self, state_shapes: Shapes, *, is_partial: bool) -> Loading:
        """Returns the receiver of the arrays of a state with these shapes. Raises UserError as
        load()."""
        of_strategy = self._of_strategy()
        all_shapes = without_loss_scale(dict(state_shapes))
        check_strategy(of_strategy, all_shapes, is_partial)
        shapes = {name: shape for name, shape in all_shapes.items() if name not in of_strategy}
        rule_optimizer.check_class(self._optimizer, shapes)
        model_has: Shapes = without_loss_scale(
            {piece.name: piece.shape for piece in self.pieces() if piece.name not in of_strategy}
        )
        state_has: Shapes = shapes
        if not isinstance(
            self._optimizer, RuleOptimizer
        ):  # a user's class creates its state in its first step
            model_has = _without_optimizer(model_has)
            state_has = _without_optimizer(shapes)
        check_fit(model_has, state_has, is_partial)
        return Loading(
            self._optimizer,
            self._scale,
            self._strategy,
            self.tensors(),
            dict(self._trained()),
            {f"p.{name}": self._strategy.part(p) for name, p in self._parameters.items()},
            of_strategy,
            all_shapes,
            is_partial=is_partial,
        )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Learner.averaged(): inside, the weights are their averages if the optimizer has averages.
        Entering it is a collective if ranks have parts of the averages."""
        if not rule_optimizer.has_averages(self._optimizer):
            yield
            return
        trained = [p for p in self._parameters.values() if p.requires_grad]
        found = self._strategy.put_together(
            lambda p: rule_optimizer.average(self._optimizer, p), trained
        )
        weights = {p: p.data for p in found}
        try:
            for p, average in found.items():
                p.data = average
            yield
        finally:
            for p, own in weights.items():
                p.data = own

    def _trained(self) -> list[tuple[str, Shard]]:
        return [
            (name, self._strategy.shard(p))
            for name, p in self._parameters.items()
            if (p.requires_grad if self._always_trained is None else p in self._always_trained)
        ]


def check_strategy(
    of_strategy: dict[str, StrategyTensor], shapes: Shapes, is_partial: bool
) -> None:
    """Raises UserError if a state lacks a tensor of the strategy (a partial one may), has one in
    another shape, or has one of another strategy."""
    found = {
        name: shape
        for name, shape in shapes.items()
        if name.startswith("s.") and "@" in name.rpartition(".")[2]
    }
    job = {name: own.shape for name, own in of_strategy.items()}
    check_fit(
        job,
        {
            name: job[name] if name in job and of_strategy[name].fits(shape) else shape
            for name, shape in found.items()
        },
        is_partial,
    )


def _notes_on_ranks(of_strategy: dict[str, StrategyTensor], shapes: Shapes) -> list[str]:
    """Returns a line if tensors that each rank has were of another number of ranks."""
    others = [
        name
        for name, own in of_strategy.items()
        if own.ranks and name in shapes and shapes[name] != own.shape
    ]
    if not others:
        return []
    name = others[0]
    more = f" and {len(others) - 1} more" * (len(others) > 1)
    ranks = of_strategy[name].ranks
    begin = (
        "this rank starts with their sum"
        if ranks == 1
        else f"each of the {ranks} ranks starts with an equal share of their sum"
    )
    return [f"the checkpoint has {name}{more} of {shapes[name][0]} ranks; {begin}"]


class Loading:
    """A state on its way into the live tensors of a learner: each array with take(), then
    finish()."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scale: Scale,
        strategy: Strategy,
        live: dict[str, torch.Tensor],
        shards: dict[str, Shard],
        parts: dict[str, Shard],
        of_strategy: dict[str, StrategyTensor],
        shapes: Shapes,
        *,
        is_partial: bool,
    ) -> None:
        """live: LearnerState.tensors(). shards: of the trained parameters; parts: of all, by the
        name of the array. shapes: of the arrays, except the loss scale."""
        self._optimizer = optimizer
        self._scale = scale
        self._strategy = strategy
        self._live = live
        self._shards = shards
        self._parts = parts
        self._of_strategy = of_strategy
        self._shapes = shapes
        self._is_partial = is_partial
        self._numbers = {
            name: rule_optimizer.keys_of_numbers(optimizer, shard.parameter)
            for name, shard in shards.items()
            if shard.shape == () and not shard.is_whole
        }
        # the optimizer's state of each parameter
        self._states: dict[str, Arrays] = {} if is_partial else {name: {} for name in shards}
        self._scale_arrays: Arrays = {}

    @torch.no_grad()
    def take(self, name: str, array: Any) -> None:
        """Copies an array, or this rank's part of it; optimizer state is kept until finish()."""
        if name in self._of_strategy:
            self._of_strategy[name].load(array)
        elif name not in self._shapes:
            self._scale_arrays[name] = np.asarray(array)
        elif name.startswith("s."):
            self._take_state(name, array)
        elif name in self._parts and not self._parts[name].is_whole:
            self._live[name].view(-1).copy_(torch.from_numpy(self._parts[name].take(array)))
        else:
            self._live[name].copy_(torch.from_numpy(np.asarray(array)))

    def _take_state(self, name: str, array: Any) -> None:
        for parameter, key in _places(name, self._shards):
            is_number = key in self._numbers.get(parameter, ()) or key.startswith(
                rule_optimizer.GROUP
            )
            self._states.setdefault(parameter, {})[key] = (
                np.asarray(array) if is_number else _part(array, self._shards[parameter])
            )

    def finish(self) -> list[str]:
        """Called after the last array. Returns lines for the user."""
        self._strategy.weights_changed()
        load_loss_scale(self._scale, self._scale_arrays)
        for name, arrays in self._states.items():
            parameter = self._shards[name].parameter
            if self._is_partial:  # it may have a parameter's numbers but not its arrays
                own = rule_optimizer.optimizer_state(self._optimizer, parameter)
                # one parameter at a time
                missing = {
                    key: tensor.cpu().numpy() for key, tensor in own.items() if key not in arrays
                }
                rule_optimizer.load_optimizer_state(self._optimizer, parameter, arrays | missing)
            else:
                rule_optimizer.load_optimizer_state(self._optimizer, parameter, arrays)
        return _notes_on_ranks(self._of_strategy, self._shapes)


def _part(array: np.ndarray | ArrayInFile, shard: Shard) -> np.ndarray:
    """Returns the shard's part of a whole parameter's state; a single number for the parameter
    applies to every shard."""
    if shard.is_whole or array.shape != shard.shape:
        return np.asarray(array)
    # the whole array may be temporary
    part: np.ndarray = shard.take(array).reshape(shard.parameter.shape).copy()
    return part


def _places(name: str, shards: dict[str, Shard]) -> Iterator[tuple[str, str]]:
    """Yields the parameter and the key of an entry of optimizer state: both may have dots."""
    parts = name.split(".")[1:]
    for count in range(1, len(parts)):
        parameter = ".".join(parts[:count])
        if parameter in shards:
            yield parameter, ".".join(parts[count:])


def _without_optimizer(shapes: Shapes) -> Shapes:
    return {name: shape for name, shape in shapes.items() if not name.startswith("s.")}


class StagingBuffer:
    """Host memory of one rank, as large as the largest tensor on its GPU; none if all lie in
    host memory."""

    def __init__(self) -> None:
        self._largest_bytes = 0
        self._buffer: torch.Tensor | None = None

    def expect(self, tensors: Iterable[torch.Tensor]) -> None:
        """Announces tensors to read next; the buffer gets the size of the largest one at the first
        read."""
        self._largest_bytes = max(
            (tensor.nbytes for tensor in tensors if not self.is_on_host(tensor)), default=0
        )

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor can be read in place."""
        return tensor.device.type == "cpu"

    def read(self, tensor: torch.Tensor) -> np.ndarray:
        """Returns a tensor's values: in place if they are in host memory, else in the buffer, which
        the next call overwrites.

        The host waits for the GPU.
        """
        tensor = tensor.detach()
        return (tensor if self.is_on_host(tensor) else self.copy(tensor)).numpy()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy in the buffer, with the numbers in the same order in memory, so the GPU
        needs no intermediate copy."""
        nbytes = max(tensor.nbytes, self._largest_bytes)
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self._buffer = None  # before there is a larger one
            self._buffer = torch.empty(
                nbytes, dtype=torch.uint8, device="cpu", pin_memory=tensor.device.type in KINDS
            )
        numbers = self._buffer[: tensor.nbytes].view(tensor.dtype)
        # the same strides as tensor.cpu()
        strides = torch.empty_like(tensor, device="meta").stride()
        return numbers.as_strided(tensor.shape, strides).copy_(tensor)


@functools.cache
def numpy_type(dtype: torch.dtype) -> np.dtype[Any]:
    """Returns NumPy's dtype. Raises TypeError for a dtype that NumPy does not have, such as
    bfloat16."""
    kind: np.dtype[Any] = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    return kind


def save_state_dict(weights: Arrays, file: BinaryIO) -> None:
    """Raises OSError if the file cannot be written, as on a full disk."""
    tensors = {name: torch.from_numpy(array).contiguous() for name, array in weights.items()}
    try:
        # a file, not a path: with a path torch's writer would not say why it failed
        torch.save(tensors, file)
    except RuntimeError as error:
        cause = error.__context__
        raise (cause if isinstance(cause, OSError) else OSError(str(error))) from None
