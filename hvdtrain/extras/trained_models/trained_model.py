"""Loads a run's model for evaluation and prediction, and converts data to its fields, with or
without targets."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import long_on_rank_0, on_rank_0
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.parallel import ParallelConfig
from hvdtrain.config.sections.shard import ShardConfig
from hvdtrain.core.arrays import ArrayInFile, Arrays, Batch
from hvdtrain.core.extras import implementing_module
from hvdtrain.data.around_source import AroundSource
from hvdtrain.data.field import TARGETS, Field, Padding, check_numbers
from hvdtrain.data.packed import PADDING, TOKENS, is_packed
from hvdtrain.data.source import Source, arrays_in_memory
from hvdtrain.data.user_data.arrays import as_images, is_array
from hvdtrain.data.user_data.as_source import as_source
from hvdtrain.errors import MEMORY, UserError, exit_code_of
from hvdtrain.features.optim import EMA
from hvdtrain.frameworks.learner import Learner, Shapes, check_fit
from hvdtrain.optim.weight_average import averages
from hvdtrain.tasks.task import Task
from hvdtrain.tasks.transform import is_image
from hvdtrain.training.build import build_learner, restore_task
from hvdtrain.training.checkpoint.files import Checkpoint, Damaged
from hvdtrain.training.checkpoint.load import OwnElements, all_ranks_see
from hvdtrain.training.checkpoint.ranges import CheckpointInParts, open_arrays
from hvdtrain.training.checkpoint.resume import GoodCheckpoint, Reading
from hvdtrain.training.replicas.broadcast import broadcast_state, common_digest

T = TypeVar("T")
IN_PARTS = (
    "on several ranks (mpirun -np N) shard.stage=3 comm.engine=mpi gives each its parts of the "
    "weights"
)


class TrainedModel(NamedTuple):
    """A trained model, equal on all ranks."""

    # with shard.stage=3 on several ranks each has its parts of the weights: then every pass is a
    # collective
    learner: Learner
    task: Task  # with the statistics of the training set
    checkpoint: Checkpoint
    # lines for the user: skipped damaged checkpoints, unused parts of the model
    notes: list[str]


def load_trained_model(
    config: Config,
    communicator: Communicator,
    find: Callable[[Reading], GoodCheckpoint],
    restore: Callable[[Config, dict[str, Any]], Task] = restore_task,
    go_on: Callable[[], None] = lambda: None,
) -> TrainedModel:
    """Builds the model of the configuration, and loads the weights of the checkpoint that find()
    returns on rank 0. Every rank calls it.

    find: called again for another checkpoint if a rank reads a damaged part of this one. restore:
    creates the task from the checkpoint's Task.facts(). go_on: called on every rank as reading
    progresses, so that the time does not count towards limits.

    With shard.stage=3 on several ranks each keeps its shard of the weights, and none holds all of
    them: if several ranks wrote the checkpoint, each reads its own elements; otherwise rank 0 sends
    arrays one by one from disk. Without it, each rank has all weights, and of a checkpoint that
    several wrote it reads a part and sends it to the others. Raises UserError on all ranks if
    find() does, or if the weights do not fit the model.
    """
    sharded = config.shard.stage == 3 and communicator.size > 1
    if sharded and config.optim.averages:
        what = f"the averages of {EMA.key} cannot be read with shard.stage=3"
        raise UserError(
            what,
            config.where("shard.stage"),
            f"shard.stage=0, or {EMA.off} for the weights without averaging",
        )
    if not sharded:  # stages 1 and 2 only shard training state
        config = config.replace(shard=ShardConfig())
    try:
        return _load(config, communicator, find, restore, go_on, mapped=sharded)
    except Exception as error:
        if exit_code_of(error) == MEMORY and not sharded and config.framework in ("torch", "jax"):
            error.add_note(f"hvdtrain: the model is whole on each rank; {IN_PARTS}")
        raise


class _Found(NamedTuple):
    """The checkpoint that rank 0 found."""

    checkpoint: Checkpoint
    notes: list[str]
    parts: CheckpointInParts | None  # if each rank reads its own elements
    # on rank 0
    shapes: Shapes
    weights: Arrays  # empty if each rank reads its own


def _load(
    config: Config,
    communicator: Communicator,
    find: Callable[[Reading], GoodCheckpoint],
    restore: Callable[[Config, dict[str, Any]], Task],
    go_on: Callable[[], None],
    *,
    mapped: bool,
) -> TrainedModel:
    damaged: dict[str, str] = {}  # why, by the name of the checkpoint's folder
    in_parts = communicator.size > 1
    while True:
        reading = Reading(sys.maxsize, mapped, in_parts=in_parts, damaged=damaged)
        found = _find(config, communicator, find, reading, go_on)
        if found.parts is not None and not all_ranks_see(communicator, found.parts):
            in_parts = False
            continue
        task = task_of(config, found.checkpoint, restore)
        learner = build_learner(config.replace(parallel=ParallelConfig()), task, communicator)
        own = {piece.name: piece.shape for piece in learner.pieces() if piece.name[:2] != "s."}
        on_rank_0(communicator, partial(check_fit, own, found.shapes))
        why = _load_weights(config, communicator, learner, found, go_on)
        if not why:
            notes = [*found.notes, *getattr(learner, "notes", ())]
            return TrainedModel(learner, task, found.checkpoint, notes)
        damaged[found.checkpoint.folder.name] = why


def _find(
    config: Config,
    communicator: Communicator,
    find: Callable[[Reading], GoodCheckpoint],
    reading: Reading,
    go_on: Callable[[], None],
) -> _Found:
    shapes: Shapes = {}
    weights: Arrays = {}

    def find_on_rank_0(
        moved: Callable[[], None],
    ) -> tuple[Checkpoint, list[str], CheckpointInParts | None]:
        nonlocal shapes, weights
        good = find(reading._replace(on_piece=moved))
        shapes = _of_model(config, good.checkpoint, good.shapes)
        if isinstance(good.arrays, CheckpointInParts):
            # each rank reads the shapes itself
            return good.checkpoint, good.notes, good.arrays._replace(shapes={})
        weights = _of_model(config, good.checkpoint, good.arrays)
        return good.checkpoint, good.notes, None

    return _Found(*long_on_rank_0(communicator, find_on_rank_0, go_on), shapes, weights)


def _load_weights(
    config: Config,
    communicator: Communicator,
    learner: Learner,
    found: _Found,
    go_on: Callable[[], None],
) -> str:
    """Returns what is wrong with the checkpoint; empty once its weights are loaded. A
    collective."""
    if found.parts is None:
        broadcast_state(communicator, learner, found.weights, only_weights=True, on_array=go_on)
        return ""
    open_file = partial(_open_weights, config, found.checkpoint, found.parts.folder)
    failures = OwnElements(communicator, learner, go_on).load(open_file, is_partial=True)
    if failures:
        return failures[0].what
    common_digest(communicator, learner)
    return ""


def _of_model(config: Config, checkpoint: Checkpoint, state: Mapping[str, T]) -> dict[str, T]:
    """Returns what a state has for the weights, averaged if the run averages them, and buffers."""
    found = {name: each for name, each in state.items() if not name.startswith("s.")}
    if config.optim.averages and checkpoint.train_state.progress.step:
        found |= averages(state)
    return found


@contextlib.contextmanager
def _open_weights(
    config: Config, checkpoint: Checkpoint, folder: Path
) -> Iterator[dict[str, ArrayInFile]]:
    """Inside, this rank can read the arrays of _of_model(). Raises Damaged, and so does reading
    one."""
    with open_arrays(folder, sys.maxsize) as arrays:
        yield _of_model(config, checkpoint, arrays)


def task_of(
    config: Config,
    checkpoint: Checkpoint,
    restore: Callable[[Config, dict[str, Any]], Task] = restore_task,
) -> Task:
    """Returns the task of the checkpoint's model. Raises Damaged if it is missing or invalid."""
    try:
        return restore(config, checkpoint.identity["data"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        what = f"the checkpoint does not record what it was trained for: {error}"
        raise Damaged(
            what,
            str(checkpoint.folder),
            "use another checkpoint, or restore the run folder from a copy",
        ) from None


def check_tokenizer(checkpoint: Checkpoint, digest: str | None, where: str) -> None:
    """Raises UserError if the model was trained with another tokenizer: tokens would mean other
    words. digest: of the tokenizer; None for bytes."""
    trained = checkpoint.identity["data"].get("tokenizer")
    if trained is not None and trained != digest:
        what = "the tokenizer has different tokens than the one that the model was trained with"
        raise UserError(what, where, "data.tokenizer=FILE, the tokenizer.json of the training")


@dataclass(frozen=True, eq=False)
class AskedSource(AroundSource):
    """Samples of another source with a task's fields and number types.

    Raises UserError if a field is missing or has another shape, and for a label outside of the
    classes.
    """

    source: Source
    asked: Mapping[str, Field]  # fields of the task
    where: str

    @property
    def fields(self) -> Mapping[str, Field]:
        return self.asked

    def __post_init__(self) -> None:
        for name, field in self.fields.items():
            found = self.source.fields.get(name)
            if found is None or not _fits(found, field):
                what = (
                    f"the model takes {name} {field}, the data have "
                    f"{f'it as {found}' if found else ', '.join(self.source.fields)}"
                )
                raise UserError(what, self.where, "data with the fields of the run")
        arrays = arrays_in_memory(self.source)
        for name, field in self.fields.items():
            if arrays is not None and field.values and name in arrays:
                check_numbers(name, arrays[name], field, self.where)

    def read(self, indices: np.ndarray) -> Batch:
        batch = self.source.read(indices)
        for name, field in self.fields.items():
            if field.values:
                check_numbers(name, batch[name], field, self.where, indices)
        return {
            name: _in_form(batch[name], field, self.source.fields[name])
            for name, field in self.fields.items()
        }


def asked_source(
    given: Any,
    fields: Mapping[str, Field],
    name: str,
    where: str,
    workers: int | None = None,
    with_targets: bool = True,
) -> AskedSource:
    """Converts data, of any kind that train_data= supports, to a source with these fields. If the
    only field is x or tokens, the data may be the array itself.

    with_targets: needed for an evaluation; without, windows may lack their last token, which is
    predicted and not read.

    Raises UserError if as_source() does not support the data, or if they do not fit the fields.
    """
    only = next(iter(fields)) if len(fields) == 1 or is_packed(fields) else None
    if only is not None and is_array(given):
        columns = [column for column in getattr(given, "columns", ()) if str(column) not in TARGETS]
        given = {only: given[columns].to_numpy() if columns else given}
    elif only is not None and isinstance(given, Mapping):
        given = {field: given[field] for field in given if field == only} or given
    if (
        isinstance(given, Mapping)
        and only == "tokens"
        and is_array(given.get(only))
        and not (with_targets or is_packed(fields))
    ):
        given = {only: _whole_windows(given[only], fields[only].shape[0])}
    padding = {
        field: kind.padding
        for field, kind in fields.items()
        if kind.padding is not None and kind.padding.mask
    }
    _refuse_masks(given, padding, where)
    kept = () if "x" in fields else tuple(fields)
    if is_packed(fields):
        source = as_source(given, name, where, workers, kept, PADDING)
        each_alone = implementing_module("data.pack").each_alone
        return AskedSource(each_alone(source, fields[TOKENS].shape[0], where), fields, where)
    gaps = [field for field, kind in fields.items() if kind.gaps]
    return AskedSource(as_source(given, name, where, workers, kept, padding, gaps), fields, where)


def _refuse_masks(given: Any, padding: Mapping[str, Padding], where: str) -> None:
    """Raises UserError if the data contain a field's mask, which is computed from the lengths of
    its samples."""
    for name, pad in padding.items():
        if isinstance(given, Mapping) and pad.mask in given:
            raise UserError(
                f"the data have {pad.mask}, but the mask is computed from the lengths of {name}",
                where,
                f"leave {pad.mask} out",
            )


def _whole_windows(tokens: Any, length: int) -> np.ndarray:
    """Creates windows that may lack their last token, which is predicted and not read."""
    array = np.asarray(tokens)
    return (
        np.pad(array, ((0, 0), (0, 1)))
        if array.ndim == 2 and array.shape[1] == length - 1
        else array
    )


def _fits(found: Field, field: Field) -> bool:
    """Whether samples can be converted to the form of a field: integers to floats, never back."""
    kinds = np.dtype(found.dtype).kind, np.dtype(field.dtype).kind
    if kinds[0] == "f" and kinds[1] != "f":
        return False
    if is_image(field):
        images = as_images(np.zeros((1, *found.shape), found.dtype))
        return images is not None and images.shape[1:] == field.shape
    return field.fits(found) or (field.shape == () and found.shape == (1,))


def _in_form(array: np.ndarray, field: Field, found: Field) -> np.ndarray:
    """Converts rows to a field's form. Padded rows get the length of the data's longest sample, so
    that outputs of all passes have one shape."""
    if field.padding is not None:
        rows = [(0, 0)] * array.ndim
        rows[1] = (0, found.shape[0] - array.shape[1])
        return np.pad(
            array.astype(field.dtype, copy=False), rows, constant_values=field.padding.value
        )
    images = as_images(array) if is_image(field) else None
    array = array if images is None else images
    return np.ascontiguousarray(array.reshape(len(array), *field.shape), field.dtype)
