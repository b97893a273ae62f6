"""The interface of a framework for custom loops: a UserLoop, the LoopLearner that it creates, and
the Samples that the script gets."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.mesh import Mesh
from hvdtrain.comm.on_all_ranks import allreduce_sums
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, Batch
from hvdtrain.core.metrics import check_one_number
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import CurrentPass


@dataclass(frozen=True)
class Samples:
    """This rank's samples of one batch: batch["x"] is an array (n, ...) on the device, in the
    number type of the data."""

    fields: Mapping[str, Any]
    # number of this rank's samples that count: 0 on a rank without samples, which gets one that
    # does not count
    count: int
    step: int = 0  # steps done before this one
    epoch: int = 0  # epoch of its first sample, from 0
    ends_epoch: bool = False  # with its last sample an epoch is over

    def __getitem__(self, name: str) -> Any:
        """Returns a field. Raises UserError for a field that the data do not have."""
        if name not in self.fields:
            raise UserError(
                f"the samples have no {name!r}",
                "ctx.samples()",
                f"their fields: {', '.join(self.fields)}",
            )
        return self.fields[name]

    def __iter__(self) -> Iterator[Any]:
        """Yields the fields, so that `x, y = batch` works."""
        return iter(self.fields.values())

    def __len__(self) -> int:
        """Returns the number of samples, including samples that do not count."""
        return len(next(iter(self.fields.values())))

    def micro_batches(self, number: int) -> list[Self]:
        """Splits the samples into `number` parts, in order. An empty part gets the first sample,
        which does not count there."""
        samples_of_parts = []
        for part in range(number):
            begin = len(self) * part // number
            end = len(self) * (part + 1) // number
            rows = slice(begin, end) if end > begin else slice(0, 1)
            count = min(end, self.count) - min(begin, self.count)
            samples_of_parts.append(
                replace(
                    self,
                    fields={name: array[rows] for name, array in self.fields.items()},
                    count=count,
                )
            )
        return samples_of_parts


class Words(NamedTuple):
    """Lines of a script in this framework, for messages."""

    prepare: str
    one: str  # what to write instead of a second prepare()
    gradient: str
    step: str  # the call that makes a step
    resume: str
    parts: str  # how gradients of parts of a batch are added up
    counted: str  # the gradient of a mean over N items

    @property
    def whole_step(self) -> str:
        return f"{self.gradient}; {self.step}"


class UserLoop:
    """The support of a framework for custom loops. Its methods import the tensor library, not its
    module."""

    words: Words

    def begin(self, config: Config, communicator: Communicator) -> None:
        """Called on every rank when the context is created. Does nothing by default."""

    def device(self, config: Config, communicator: Communicator) -> Any:
        """Returns this rank's device as the framework's own object."""
        raise NotImplementedError

    def learner(
        self,
        config: Config,
        mesh: Mesh,
        model: Any,
        optimizer: Any,
        on_step: Callable[[], None],
        example: Any,
    ) -> Any:
        """Creates the LoopLearner for the prepared objects; on_step: called after each step."""
        return self.learner_class()(config, mesh, model, optimizer, on_step, example)

    def to_arrays(self, values: Mapping[str, Any]) -> Arrays:
        """Returns a copy of each value that the script keeps in a checkpoint. Raises UserError as
        extra.to_arrays()."""
        arrays: Arrays = self.extra().to_arrays(values)
        return arrays

    def from_arrays(self, arrays: Arrays) -> dict[str, Any]:
        """Returns the values of to_arrays(). Raises ValueError if they cannot be such."""
        values: dict[str, Any] = self.extra().from_arrays(arrays)
        return values

    def learner_class(self) -> Callable[..., Any]:
        """Returns the class of LoopLearners; it takes the same arguments as learner()."""
        raise NotImplementedError

    def extra(self) -> Any:
        """Returns the module with to_arrays() and from_arrays()."""
        raise NotImplementedError


class Divisor:
    """The divisor of the mean loss of a batch: its samples, or the items that the script counts
    (tokens, labelled pixels)."""

    def __init__(self, config: Config, data: Communicator) -> None:
        """data: the group of ranks that read different samples."""
        self._padded = next(iter(config.data.pad), None)
        self._data = data
        self._is_counted: bool | None = (
            None  # whether the script counts; unknown before the first step
        )
        self.items: float | None = None  # this rank's count in this step's batch

    @property
    def is_missing(self) -> bool:
        """Whether the mean of this batch is not over samples, and its items are not counted yet."""
        return self.items is None and (self._padded is not None or self._is_counted is True)

    def need_count(self, where: str, fix: str) -> None:
        """Called for a loss without a count. Raises UserError if data.pad needs a count."""
        if self._padded is not None:
            what = (
                f"data.pad makes samples of {self._padded} variable-length, but the call does not "
                "say how many items the loss averages over"
            )
            raise UserError(what, where, f"{fix}; for a mean over samples, N is batch.count")

    def agree(self, where: str, *, is_counted: bool) -> None:
        """Raises UserError if other ranks or steps pass a count and this one does not, or vice
        versa. A collective in the first step."""
        if self._is_counted is None:
            ranks = allreduce_sums(self._data, {"counted": float(is_counted)}, "context.counted")[
                "counted"
            ]
            if ranks not in (0, self._data.size):
                raise UserError(
                    f"{ranks:g} of {self._data.size} ranks give a count",
                    where,
                    "a count on every rank, or on none",
                )
            self._is_counted = is_counted
        if self._is_counted != is_counted:
            what = (
                "earlier steps have a count, but this one does not"
                if self._is_counted
                else "this step has a count, but earlier ones do not"
            )
            raise UserError(what, where, "a count in every step on every rank, or in none")

    def total(self, own: float) -> float:
        """Returns the number of items of all ranks, at least a number that can be divided by. own:
        this rank's. A collective."""
        self.items = own
        return allreduce_sums(self._data, {"items": own}, "context.items")["items"] or 1.0


def item_count(count: Any, where: str) -> float:
    """Returns the count that a script passed: a number, or an array of one number, for which the
    host waits. Raises UserError for anything else."""
    fix = "the number of items that the loss averages over: count=(targets != -100).sum()"
    if isinstance(count, bool):
        raise UserError(f"count={count} is not a number of items", where, fix)
    check_one_number("count", count, where)
    items = float(count.detach() if hasattr(count, "detach") else count)
    if not math.isfinite(items) or items < 0:
        raise UserError(f"count={items:g} is not a number of items", where, fix)
    return items


class LoopLearner:
    """A script's model and optimizer on this rank: implements HasState and the calls of a Context.

    A call that the framework does not have raises UserError, as it does here.
    """

    words: Words
    divisor: Divisor

    def cache_on_device(self, source: Source) -> bool:
        """Never caches: the script may read any sample."""
        return False

    def to_device(self, batch: Batch) -> Samples:
        """Returns each field, numpy (n, ...), as an array on the device."""
        raise NotImplementedError

    def begin_step(self, batch: Any, global_batch: int, seed: int) -> Any:
        """Begins a step; returns the batch for the script. seed: of the samples."""
        raise NotImplementedError

    @property
    def prepared(self) -> tuple[Any, Any]:
        """Returns the result of Context.prepare()."""
        raise NotImplementedError

    @property
    def user_model(self) -> Any:
        """Returns the script's object that training changes, which must not be prepared again after
        a rank was lost; if there is none, the learner."""
        return self

    def check_prepared(self, model: Any, optimizer: Any, where: str) -> None:
        """Raises UserError if these are not the objects that prepare() returned, or their current
        versions."""
        raise NotImplementedError

    def check_resume(self, given: tuple[Any, ...]) -> None:
        """Raises UserError for arguments that Context.resume() does not accept."""
        raise NotImplementedError

    def resumed(self, extra: dict[str, Any]) -> Any:
        """Returns the result of Context.resume()."""
        raise NotImplementedError

    @property
    def has_stepped(self) -> bool:
        """Whether the last batch's step was made."""
        raise NotImplementedError

    def end_steps(self) -> None:
        """Called when a checkpoint may be written: the steps of the batch are made."""

    def under_way(self) -> CurrentPass | None:
        """Returns Learner.under_way()."""
        return None

    def backward(self, loss: Any, count: Any, *, retain_graph: bool) -> None:
        """Implements Context.backward(). A collective."""
        self._refuse("ctx.backward()", self.words.gradient)

    def accumulate(self, loss_of: Callable[[Any], Any], at_most: int) -> Any:
        """Implements Context.accumulate(). A collective."""
        self._refuse("ctx.accumulate()", self.words.parts)

    def value_and_grad(
        self, loss_of: Callable[..., Any], *, has_aux: bool, has_count: bool, at_most: int | None
    ) -> Callable[..., Any]:
        """Returns the function of Context.value_and_grad(), which is a collective."""
        self._refuse("ctx.value_and_grad()", self.words.gradient)

    def update(
        self, gradient: Any, state: Any, params: Any, extra: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Implements Context.update()."""
        self._refuse("ctx.update()", self.words.step)

    def _refuse(self, call: str, instead: str) -> NoReturn:
        raise UserError(
            f"{call} does not support the framework of this loop",
            call,
            f"{instead}; or another framework= in hvdtrain.init()",
        )


def frameworks_of_user_loops() -> list[str]:
    """Returns the frameworks with a file for custom loops."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/user_loop"))


def user_loop_of(framework: str) -> UserLoop:
    """Returns the UserLoop of a framework, without importing a tensor library."""
    user_loop: UserLoop = importlib.import_module(
        f"hvdtrain.frameworks.{framework}.user_loop.loop"
    ).LOOP
    return user_loop
