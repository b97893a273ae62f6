"""hvd.elastic for Keras: a model that continues from its last commit when a rank dies, and
callbacks that commit in fit()."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.horovod.elastic import ObjectState, State, init, shutdown
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.traced.elastic import VariablesState, run


class KerasState(VariablesState):
    """A model with its optimizer, and values: KerasState(model, batch=0, epoch=0)."""

    def __init__(
        self, model: Any, optimizer: Any = None, backend: None = None, **values: Any
    ) -> None:
        """optimizer: if it differs from the optimizer of model.compile(). Raises BadCall for a
        model that is not built."""
        if not model.built:
            raise BadCall(
                "Model must be built first",
                "hvd.elastic.KerasState()",
                "keras.Input(...) as its first layer, or model.build(shape)",
            )
        self.model = model
        self.optimizer = model.optimizer if optimizer is None else optimizer
        super().__init__(self._all_variables, **values)

    def _all_variables(self) -> list[Any]:
        if self.optimizer is None:
            return list(self.model.weights)
        if not self.optimizer.built:
            self.optimizer.build(self.model.trainable_variables)
        return [*self.model.weights, *self.optimizer.variables]


class CommitStateCallback(keras.callbacks.Callback):
    """Commits the state after every `batches_per_commit` batches, and after each epoch."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self._state = state
        self._every = batches_per_commit
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if self._batches % self._every == 0:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._commit()

    def _commit(self) -> None:
        self.model.built  # noqa: B018  # Callback.model: with JAX it then has the current variables
        self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Sets state.batch to the last batch of the epoch, and to 0 after it. Put it before
    CommitStateCallback in the list."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Counts epochs in state.epoch over all calls of fit(), while each call counts from 0. Put it
    before CommitStateCallback in the list."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state
        self._before = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._before = self._state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._state.epoch = self._before + epoch + 1


__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "init",
    "run",
    "shutdown",
]
