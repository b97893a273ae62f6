"""hvd.elastic: a training function that continues from its last commit when a rank is lost: run(),
states and the sampler."""

from __future__ import annotations

import copy
import functools
import importlib
import random
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Protocol

import torch

from hvdtrain.horovod.basics import init, recover, shutdown
from hvdtrain.horovod.engine.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.objects import broadcast_object
from hvdtrain.horovod.parameters import broadcast_optimizer_state, broadcast_parameters


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function whose first argument is a State: func(state, ...).

    The state is synchronized before each call. When a rank dies, the others return to their last
    commit, exclude it, and call the function again. That needs an engine that survives dead ranks:
    mpi under `mpirun --with-ft ulfm`, or torchdist without torchrun's elasticity (docs/elastic.md).
    On other engines the error ends the job, as without elastic.run.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        JOB.be_elastic()
        is_synchronized = False
        while True:
            try:
                if not is_synchronized:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                recover(error)
                state.restore()
                is_synchronized = False
            except HostsUpdatedInterrupt as interrupt:
                is_synchronized = interrupt.skip_sync
            state.on_reset()

    return wrapper


class State:
    """The interface of a state for elastic.run()."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Registers callbacks that are called after ranks died, for example to set the learning
        rate for the new size."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the state until the next commit. A collective: a state damaged by the loss of a
        rank is not saved."""
        JOB.engine.confirm()
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Does nothing: ranks are never added to a running job."""

    def reset(self) -> None:
        """Resets what depends on rank and size."""

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError


class ObjectState(State):
    """A state of values, as attributes with these names."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._saved = values
        self._names = list(values)
        self.restore()

    def save(self) -> None:
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        if self._names:
            self._saved = broadcast_object({name: getattr(self, name) for name in self._names})
            # only the values, because TorchState's other state is not saved yet
            ObjectState.restore(self)


class TorchState(ObjectState):
    """Models, optimizers and ElasticSamplers under any names, and values: TorchState(model,
    optimizer, batch=0, epoch=0)."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **values: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **values}
        self._handlers = {
            name: handler
            for name, value in given.items()
            if (handler := _handler(value)) is not None
        }
        for name in self._handlers:
            object.__setattr__(self, name, given[name])
        super().__init__(
            **{name: value for name, value in given.items() if name not in self._handlers}
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; a new model, optimizer or sampler replaces the old one in the saved
        state."""
        if name in self.__dict__.get("_handlers", {}) and (handler := _handler(value)) is not None:
            self._handlers[name] = handler
        object.__setattr__(self, name, value)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        for handler in self._handlers.values():
            handler.save()


class _Stateful(Protocol):
    """An object with a state_dict."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class _Handler:
    """Keeps the state_dict of one object."""

    def __init__(self, value: _Stateful, broadcast: Callable[[Any], None]) -> None:
        """broadcast: makes the object equal to rank 0's."""
        self._value = value
        self._broadcast = broadcast
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self._value.state_dict())

    def restore(self) -> None:
        self._value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self._broadcast(self._value)


def _handler(value: Any) -> _Handler | None:
    if isinstance(value, torch.nn.Module):
        return _Handler(value, lambda model: broadcast_parameters(model.state_dict(), root_rank=0))
    if isinstance(value, torch.optim.Optimizer):
        return _Handler(value, lambda optimizer: broadcast_optimizer_state(optimizer, root_rank=0))
    if isinstance(value, ElasticSampler):
        return _Handler(
            value, lambda sampler: sampler.load_state_dict(broadcast_object(sampler.state_dict()))
        )
    return None


class ElasticSampler(torch.utils.data.Sampler[int]):
    """A sampler with the same number of samples on every rank; some samples are repeated if they do
    not divide evenly.

    Call record_batch() after each batch and set_epoch() at the end of an epoch, and pass it to the
    TorchState.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """seed: the same on every rank."""
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = self.processed_num = (
            0  # epoch, and how many samples of it all ranks together have had
        )
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, with a new order."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that every rank has processed `batch_size` more samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divides the remaining samples among the current ranks."""
        self.num_replicas = JOB.engine.size
        self.rank = JOB.engine.rank
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        again = [left[i % len(left)] for i in range(len(left), self.total_size)]
        return iter((left + again)[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


def __getattr__(name: str) -> Any:
    """Returns Horovod's modules that contain the sampler and the states."""
    if name in ("sampler", "state"):
        return importlib.import_module(f"hvdtrain.horovod.torch.elastic.{name}")
    raise AttributeError(f"hvdtrain.horovod.elastic has no {name!r}")


__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "init", "run", "shutdown"]
