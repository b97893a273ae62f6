"""The training and validation set of a job, and the task that they define."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import BATCH_KEYS
from hvdtrain.core.extras import implementing_module, maps_module
from hvdtrain.data.array_files import ReadingRanks, array_files_in
from hvdtrain.data.configured.columns import check_columns, with_columns
from hvdtrain.data.configured.opened import open_split, plugin_of, root_of, with_keys
from hvdtrain.data.configured.pad import packed_rows
from hvdtrain.data.configured.split import Division, divided, evaluated_part, share_of_train
from hvdtrain.data.declared import as_declared, bounded_alike
from hvdtrain.data.input_encoding import unencoded
from hvdtrain.data.sampler import Order
from hvdtrain.data.source import Source, Split
from hvdtrain.data.subset import without_fields
from hvdtrain.errors import UserError
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.tasks.task import Task, is_users_model, tokens_of_sample
from hvdtrain.tasks.transform import is_image
from hvdtrain.training.build import build_recipe, build_task
from hvdtrain.training.common_array import CommonArray
from hvdtrain.training.input import DEFAULT_BLOCK
from hvdtrain.training.model_inputs import names_to_keep


class Datasets(NamedTuple):
    """The data that a rank reads without other ranks."""

    train: Source
    val: Source
    task: Task
    draws: Order | None = None  # of the training samples; None: each epoch is shuffled


def open_datasets(config: Config, communicator: Communicator | None = None) -> Datasets:
    """Opens both sets. Every rank of a communicator calls it, so that values computed from the data
    are the same on all of them.

    Raises UserError if data are missing or broken, or do not match the recipe or the augmentation.
    """
    sources = _open_sources(config, CommonArray(communicator or SingleProcessCommunicator()))
    train = packed_rows(config, sources.train, "training")
    val = packed_rows(config, sources.val, "validation")
    ranks = communicator or SingleProcessCommunicator()
    if (files := array_files_in(train)) is not None:
        files.read_together(ReadingRanks(ranks.rank, ranks.size, ranks.allreduce))
    _check_reading(config, train, val)
    check_augmentation(config, train)
    task = build_task(train, val, config)
    _check_augmented(config, task)
    _check_moved(config, task)
    _check_lengths(config, train, task)
    build_recipe(config, len(train), tokens_of_sample(task))
    evaluated_part(config, val)
    draws = train.order
    if config.data.sample_weights is not None:
        draws = implementing_module("data.sample_weights").draws_of(config, train)
    train, val = (
        as_declared(_with_free_names(config, source, task), task.fields) for source in (train, val)
    )
    if config.augment.is_enabled and task.masks:
        moved = maps_module("moved_masks", config.where("task.name"))
        train = moved.with_moved_masks(train, task.masks, config.augment)
    return Datasets(train, val, task, draws)


def _with_free_names(config: Config, source: Source, task: Task) -> Source:
    """Drops fields whose names are used for something else in a batch. Raises UserError if the task
    needs such a field."""
    taken = [name for name in source.fields if name in BATCH_KEYS]
    if used := [name for name in taken if name in task.fields]:
        what = f"the data have a field named {used[0]}, but that name is reserved in a batch"
        raise UserError(what, config.where("data.name"), f"another name: {used[0]}_of_sample")
    return without_fields(source, taken) if taken else source


def recipe_of(config: Config, datasets: Datasets) -> Recipe:
    """Returns the recipe of a job on these data."""
    return build_recipe(config, len(datasets.train), tokens_of_sample(datasets.task))


def check_augmentation(config: Config, source: Source) -> None:
    """Raises UserError if the data are not images that support this augmentation."""
    x = source.fields.get("x")
    if x is not None and is_image(x):
        if config.augment.is_enabled:
            from hvdtrain.data.images import augment

            height, width, channels = x.shape
            augment.check_augmentation(config.augment, (height, width, channels))
    elif config.augment.is_enabled:
        fields = ", ".join(f"{name} {field}" for name, field in source.fields.items())
        image = next((name for name, field in source.fields.items() if is_image(field)), None)
        fix = "leave the keys of augment out" + (
            f", or call the field {image} x" if image and x is None else ""
        )
        raise UserError(
            f"augmentation needs images; the data have {fields}", config.where("data.name"), fix
        )


def _check_augmented(config: Config, task: Task) -> None:
    """Raises UserError if the model gets no x: only x can be augmented."""
    if config.augment.is_enabled and "x" not in task.fields:
        what = f"augmentation applies to x, but the model takes {', '.join(task.input_fields)}"
        raise UserError(
            what,
            config.where("data.inputs"),
            "leave the keys of augment out, or an x among the inputs",
        )


def _check_moved(config: Config, task: Task) -> None:
    """Raises UserError if augmentation would move the pixels of x, but not the numbers of y."""
    moving = ("crop", "resized_crop", "flip", "rand_augment")
    key = next((key for key in moving if getattr(config.augment, key)), None)
    if key is None or not task.map_names:
        return
    raise UserError(
        f"augment.{key} moves the pixels of x, but not the maps y of task.name={task.name}",
        config.where(f"augment.{key}"),
        f"leave augment.{key} out",
    )


def _check_reading(config: Config, *sources: Source) -> None:
    """Raises UserError if threads would run the user's code during training."""
    data = config.data
    key = "readers" if data.readers else "ahead"
    if (data.ahead or data.readers) and any(source.reads_in_process for source in sources):
        what = (
            f"data.{key}={getattr(data, key)} reads on other threads than training, but the "
            "random generators that "
        )
        what += "a Dataset draws from are shared by all threads"
        raise UserError(
            what,
            config.where(f"data.{key}"),
            f"leave data.{key} out, or data.workers=1: worker processes read ahead",
        )


def _check_lengths(config: Config, train: Source, task: Task) -> None:
    """Raises UserError if variable-length samples meet a task or a model that needs one length."""
    where = config.where("data.pad")
    named = task.name
    if config.data.pack is not None and not task.takes_lengths:
        what = "data.pack packs tokens for task.name=language, but this job has a custom loss"
        raise UserError(
            what,
            config.where("data.pack"),
            "task.name=language without a custom loss; or data.pad={tokens: 0} with it",
        )
    several = () if task.transforms is None else task.transforms.each
    for name, field in train.fields.items():
        if field.padding is None or field.is_mask or name not in task.fields:
            continue
        if (
            not task.takes_lengths
            and not plugins.is_dotted(config.task.name)
            and name not in several
        ):
            what = (
                f"task.name={named} needs {name} of one length, but data.pad pads it to the "
                "longest sample of a micro-batch"
            )
            by_model = (
                f"a model whose forward() has the parameters {name} and {field.padding.mask}; "
                if name != "y"
                else ""
            )
            raise UserError(
                what,
                where,
                f"{by_model}a custom loss, which also gets {field.padding.mask}; or "
                "task.name=language",
            )
        if not task.takes_lengths and not is_users_model(config.model):
            what = (
                f"model.name={config.model.name} needs samples of one length, but data.pad pads "
                f"{name} to the longest sample of a micro-batch"
            )
            raise UserError(
                what,
                where,
                "a model of your own, hvdtrain.train(model=...); or model.name=gpt with "
                "task.name=language",
            )


def build_source(config: Config, split: Split, array: CommonArray | None = None) -> Source:
    """Opens one of the two sets. It needs no other ranks, so missing data is reported before any
    rank waits for another. Raises UserError.

    array: completes unfinished samples; without it, this process computes it.
    """
    array = array or CommonArray(SingleProcessCommunicator())
    if config.data.val_share is not None:
        division = divided(config, config.data.val_share, _open(config, "train", array))
        train = share_of_train(config, division.train)
        source = train if split == "train" else division.val
        source = _encoded(source, array, lambda: train)
    else:
        source = _open(config, split, array)
        if split == "train":
            source = share_of_train(config, source)
        source = _encoded(
            source,
            array,
            lambda: (
                source
                if split == "train"
                else share_of_train(config, _open(config, "train", array))
            ),
        )
    return packed_rows(config, source, "training" if split == "train" else "validation")


def _open(config: Config, split: Split, array: CommonArray) -> Source:
    return array.measured(open_split(config, split, array.finish, lambda: names_to_keep(config)))


def _encoded(source: Source, array: CommonArray, train: Callable[[], Source]) -> Source:
    """Returns the source with the columns of its table encoded as the training rows say; other data
    are not changed."""
    if not source.has_encoded_columns:
        return source
    return array.finish(unencoded(source), lambda: unencoded(train()))


def _open_sources(config: Config, array: CommonArray) -> Division:
    """Opens both sets. Raises as _open_division()."""
    train, val = _open_division(config, array)
    train = share_of_train(config, train)
    return Division(*(_encoded(source, array, lambda: train) for source in (train, val)))


def _open_division(config: Config, array: CommonArray) -> Division:
    """Opens both sets. Raises UserError; mismatched class folders are reported before an image is
    decoded."""
    if config.data.val_share is not None:
        return divided(config, config.data.val_share, _open(config, "train", array))
    check_splits = (
        None
        if plugins.is_users_own(config.data)
        else getattr(plugin_of(config), "check_splits", None)
    )
    if check_splits:
        with with_keys(config):
            check_splits(root_of(config))
    train = _open(config, "train", array)
    val = _open(with_columns(config, train), "val", array)
    check_columns(config, train, val)
    return Division(*bounded_alike(train, val))


def with_blocks(config: Config, source: Source) -> Config:
    """Returns the configuration with the block size of data.shuffle=blocks: by default the chunk or
    row group of the files."""
    if config.data.shuffle != "blocks" or config.data.shuffle_block is not None:
        return config
    files = array_files_in(source)
    block = None if files is None else files.rows_of_block
    return config.replace(data=config.data.replace(shuffle_block=block or DEFAULT_BLOCK))
