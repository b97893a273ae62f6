"""Predictions and metrics of a run's model on data from a script or a command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import Given, is_object
from hvdtrain.data.configured.columns import columns_of_x
from hvdtrain.data.configured.unwritten import unstaged
from hvdtrain.data.input_encoding import encoding_of_run
from hvdtrain.data.source import Source
from hvdtrain.data.user_data.as_source import in_order_of
from hvdtrain.errors import UserError, short
from hvdtrain.extras.trained_models.evaluation import evaluate as evaluate_samples
from hvdtrain.extras.trained_models.only_inputs import OnlyInputs
from hvdtrain.extras.trained_models.saved_weights import load_checkpoint, run_folder
from hvdtrain.extras.trained_models.trained_model import TrainedModel, asked_source
from hvdtrain.tasks.several_inputs import restore_inputs, with_several_inputs
from hvdtrain.tasks.task import Task, is_users_model
from hvdtrain.tasks.user_tasks import with_inputs_of, without_loss
from hvdtrain.training.build import restore_task
from hvdtrain.training.data_facts import digests
from hvdtrain.training.predictions import predict as predict_samples
from hvdtrain.training.replicas.same_job import check_same_facts, facts
from hvdtrain.training.run_rank import ConnectedRank

# replaces the task: a prediction uses the checkpoint's task
WITHOUT_TARGETS = Given("<object of hvdtrain:predict>", lambda: None, {})


class AskedData(NamedTuple):
    """Data passed by the user."""

    given: Any
    name: str  # for messages
    where: str


def predict_data(
    rank: ConnectedRank,
    data: AskedData,
    which: str,
    of: Callable[
        [np.ndarray, TrainedModel, np.ndarray | None], np.ndarray
    ] = lambda outputs, model, lengths: outputs,
) -> tuple[TrainedModel, np.ndarray]:
    """Predicts with checkpoint `which` of the run. Returns the result of of() for each sample (n,
    ...), in the order of the data, on every rank.

    The last argument of of(): the number of tokens of padded samples, int64 (n,); else None.

    Every rank calls it. Raises UserError if the data do not match the model.
    """
    config = unstaged(rank.config)
    communicator = rank.communicator
    model = load_checkpoint(rank, which, inputs_alone)
    source = _asked(rank, data, model.task, with_targets=False)
    lengths = source.known_lengths("tokens")
    found = [
        of(predictions.outputs, model, None if lengths is None else lengths[indices])
        for indices, predictions in predict_samples(
            config, model.learner, source, communicator, rank.heartbeat
        )
    ]
    return model, _of_all_ranks(communicator, found)


def evaluate_data(rank: ConnectedRank, data: AskedData, which: str) -> dict[str, float]:
    """Returns the metrics of checkpoint `which` on the data. Every rank calls it. Raises UserError
    if the data do not match the model."""
    config = unstaged(rank.config)
    communicator = rank.communicator

    def restore(config: Config, of_checkpoint: dict[str, Any]) -> Task:
        return _task_of_script(config, of_checkpoint, lambda task: _asked(rank, data, task))

    model = load_checkpoint(rank, which, restore)
    source = _asked(rank, data, model.task)
    return evaluate_samples(
        config, model.learner, source, model.task, communicator, rank.heartbeat
    ).metrics


def _asked(rank: ConnectedRank, data: AskedData, task: Task, with_targets: bool = True) -> Source:
    """Returns the data with the fields of the task, the same on every rank."""
    columns = columns_of_x(rank.config.data.options)
    encoding = encoding_of_run(run_folder(rank))
    if encoding is not None:
        given = encoding.encode(data.given, rank.config.data.class_names or (), data.where)
    else:
        given = data.given if not columns else in_order_of(data.given, columns)
    source = asked_source(
        given, task.fields, data.name, data.where, rank.config.data.workers, with_targets
    )
    if rank.communicator.size > 1:
        found = {"samples": len(source), **digests(source, "given", rank.config.seed)}
        check_same_facts(rank.communicator, facts(rank.config, found, rank.communicator.name))
    return source


def inputs_alone(config: Config, of_checkpoint: dict[str, Any]) -> Task:
    """Returns the checkpoint's task without its targets. Raises as restore_task() does."""
    name = of_checkpoint.get("task", "classification")
    if config.task.given is not WITHOUT_TARGETS:
        return OnlyInputs(restore_task(config, of_checkpoint))
    if is_object(name):
        outputs = config.task.options.get("outputs")
        return OnlyInputs(
            _without_loss(of_checkpoint, outputs if isinstance(outputs, int) else None)
        )
    if plugins.is_dotted(name):
        what = f"the run has task.name={short(name)}, which is custom code"
        raise UserError(
            what,
            config.where("task.name"),
            f"if you trust it, add the argument task.name={short(name)}",
        )
    return OnlyInputs(
        restore_inputs(
            of_checkpoint, plugins.load("tasks", name, config.where("task.name")).restore
        )
    )


def _without_loss(of_checkpoint: dict[str, Any], outputs: int | None) -> Task:
    return restore_inputs(of_checkpoint, lambda facts: without_loss(facts, outputs))


def _task_of_script(
    config: Config, of_checkpoint: dict[str, Any], asked: Callable[[Task], Source]
) -> Task:
    """Returns the checkpoint's task with the loss and the metrics of a script. Raises as
    restore_task() does."""
    given = config.task.given
    if given is None:
        return restore_task(config, of_checkpoint)
    if given.name is None:  # only metrics
        task = restore_task(config, of_checkpoint)
        measured: Task = given.make(task, asked(task))
        return measured
    task = _without_loss(of_checkpoint, None)
    source = asked(task)
    if task.transforms is not None:
        return with_several_inputs(lambda one: _of_script(config, one), source, of_checkpoint)
    return with_inputs_of(_of_script(config, source), of_checkpoint)


def _of_script(config: Config, source: Source) -> Task:
    """Returns the task of the script's loss and metrics for these data."""
    known = {
        "name": config.task.name,
        "train": source,
        "val": source,
        "users_model": is_users_model(config.model),
    }
    task: Task = plugins.call_own(config.task, known)
    return task


def _of_all_ranks(communicator: Communicator, mine: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the rows of all ranks, in rank order; a rank may have none."""
    outputs = np.concatenate(mine) if mine else None
    forms = communicator.allgather_object(
        None if outputs is None else (str(outputs.dtype), list(outputs.shape[1:]))
    )
    dtype, shape = next(form for form in forms if form is not None)
    rows = np.empty((0, *shape), dtype) if outputs is None else np.ascontiguousarray(outputs)
    gathered = communicator.allgather(
        rows.reshape(len(rows), -1) if rows.size else np.empty((0, int(np.prod(shape))), dtype),
        "predictions",
    )
    return np.asarray(gathered).reshape(-1, *shape)
