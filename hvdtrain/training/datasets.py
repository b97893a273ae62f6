"""The training and validation set of a job, and the task that they define; the codebook of image
tokens is the same on all ranks."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.comm.on_all_ranks import on_rank_0_only
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.config.section import class_of_object, is_object
from hvdtrain.config.yaml_reader import MOST_BYTES
from hvdtrain.core.arrays import BATCH_KEYS, digest
from hvdtrain.core.folder import Folder
from hvdtrain.data.codebook import (
    FILE,
    MOST_FILE_BYTES,
    Codebook,
    TokenImages,
    UnencodedImages,
    from_json,
    to_json,
)
from hvdtrain.data.files.staging import stage_data
from hvdtrain.data.images import augment
from hvdtrain.data.images.image_source import ImageSource
from hvdtrain.data.images.masks import with_moved_masks
from hvdtrain.data.own.as_source import as_declared, as_source, bounded_alike
from hvdtrain.data.packed import PADDING, packed
from hvdtrain.data.sampler import BLOCKS_VERSION, WeightedDraws, evaluated_samples, shuffle_version
from hvdtrain.data.source import LabelledImages, Padding, Source, Split
from hvdtrain.data.stored.source import read_by, stored_in
from hvdtrain.data.stored.statistics import Ranks
from hvdtrain.data.subset import Division, divide, subset, without_fields
from hvdtrain.errors import UserError
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.tasks.classification import Classification
from hvdtrain.tasks.inputs import is_image
from hvdtrain.tasks.task import Task, is_users_model, tokens_of_sample
from hvdtrain.training.build import build_recipe, build_task
from hvdtrain.training.checkpoint.files import Identity
from hvdtrain.training.input import DEFAULT_BLOCK, block_shuffle, ranks_read_own_blocks
from hvdtrain.training.model_inputs import names_to_keep, notes_on_fields
from hvdtrain.training.sample_weights import checked_weights, read_weights

# Task.facts() of images, by the name that a message gives them
_FACT_NAMES = {
    "shape": "image shape",
    "classes": "classes",
    "mean": "mean of the pixels",
    "std": "their deviation",
}
_OF_TASK = " of the task"  # after the names of all others
_LOSSES_OF_CLASSES = ("CrossEntropyLoss", "NLLLoss")  # of torch, given to hvdtrain.train()


class Datasets(NamedTuple):
    """What a rank reads by itself, without other ranks."""

    train: Source
    val: Source
    task: Task
    draws: WeightedDraws | None = None  # of data.sample_weights; None: a shuffle of each epoch


def open_datasets(config: Config, communicator: Communicator | None = None) -> Datasets:
    """Opens both sets; every rank of a communicator calls it, which makes what is computed of the
    data the same on all of them.

    Raises UserError where data are missing or broken, or do not fit the recipe or the augmentation.
    """
    sources = _open_sources(config, CommonCodebook(communicator or SingleProcessCommunicator()))
    train = _packed(config, sources.train, "training")
    val = _packed(config, sources.val, "validation")
    ranks = communicator or SingleProcessCommunicator()
    if (files := stored_in(train)) is not None:
        files.read_together(Ranks(ranks.rank, ranks.size, ranks.allreduce))
    _check_reading(config, train, val)
    check_augmentation(config, train)
    task = build_task(train, val, config)
    _check_augmented(config, task)
    _check_lengths(config, train, task)
    build_recipe(config, len(train), tokens_of_sample(task))
    evaluated_part(config, val)
    draws = draws_of(config, train)
    train, val = (
        as_declared(_with_free_names(config, source, task), task.fields) for source in (train, val)
    )
    return Datasets(with_moved_masks(train, task.masks, config.augment), val, task, draws)


def _with_free_names(config: Config, source: Source, task: Task) -> Source:
    """The source without fields that have the name of something else in a batch. Raises UserError
    where the task has such a field."""
    taken = [name for name in source.fields if name in BATCH_KEYS]
    if used := [name for name in taken if name in task.fields]:
        what = f"the data have a field named {used[0]}, and a batch has something else by that name"
        raise UserError(what, config.where("data.name"), f"another name: {used[0]}_of_sample")
    return without_fields(source, taken) if taken else source


def recipe_of(config: Config, datasets: Datasets) -> Recipe:
    """Every number of every step of a job on these data."""
    return build_recipe(config, len(datasets.train), tokens_of_sample(datasets.task))


def draws_of(config: Config, train: Source) -> WeightedDraws | None:
    """What data.sample_weights draws; None without it. Raises UserError where there are no such
    weights."""
    asked = config.data.sample_weights
    where = config.where("data.sample_weights")
    if asked is None:
        return None
    if not is_object(asked):
        return WeightedDraws(read_weights(train, asked, _ignored_label(config), where))
    given = None if config.data.given is None else config.data.given.objects.get("sample_weights")
    if given is None:
        raise UserError(
            "data.sample_weights is an array of a script, and only that script has it",
            where,
            "hvdtrain.train(sample_weights=)",
        )
    return WeightedDraws(checked_weights(np.asarray(given), len(train), where))


def _ignored_label(config: Config) -> int | None:
    """The label of samples without a class: of the task, or of a loss of torch that a script gives;
    None where there is none."""
    if not plugins.is_dotted(config.task.name):
        found: int | None = plugins.convert_options(config.task, "tasks").get("ignore_label")
        return found
    objects = {} if config.task.given is None else config.task.given.objects
    return getattr(objects.get("loss"), "ignore_index", None)


def evaluated_part(config: Config, val: Source) -> Source:
    """What an evaluation reads of the validation set: evaluate.samples of it, drawn by the seed, in
    the order of the set; or all.

    Raises UserError where there are not so many.
    """
    count = config.evaluate.samples
    if count is None or count == len(val):
        return val
    if count > len(val):
        what = f"evaluate.samples={count} is more than the {len(val)} validation samples"
        raise UserError(
            what, config.where("evaluate.samples"), f"{len(val)} or less, or leave it out"
        )
    return subset(val, evaluated_samples(len(val), count, config.seed))


def check_augmentation(config: Config, source: Source) -> None:
    """Raises UserError where the data are no images that can be augmented so."""
    x = source.fields.get("x")
    if x is not None and is_image(x):
        height, width, channels = x.shape
        augment.check_augmentation(config.augment, (height, width, channels))
    elif augment.is_enabled(config.augment):
        fields = ", ".join(f"{name} {field}" for name, field in source.fields.items())
        image = next((name for name, field in source.fields.items() if is_image(field)), None)
        fix = "leave the keys of augment out" + (
            f", or call the field {image} x" if image and x is None else ""
        )
        raise UserError(
            f"augmentation is of images; the data have {fields}", config.where("data.name"), fix
        )


def _check_augmented(config: Config, task: Task) -> None:
    """Raises UserError where the model gets no x, which is what is augmented."""
    if augment.is_enabled(config.augment) and "x" not in task.fields:
        what = f"augmentation is of x, and the model gets {', '.join(task.input_fields)}"
        raise UserError(
            what,
            config.where("data.inputs"),
            "leave the keys of augment out, or an x among the inputs",
        )


def _check_reading(config: Config, *sources: Source) -> None:
    """Raises UserError where threads would run the user's code beside the training."""
    data = config.data
    key = "readers" if data.readers else "ahead"
    if (data.ahead or data.readers) and any(source.reads_in_process for source in sources):
        what = (
            f"data.{key}={getattr(data, key)} reads on other threads than the one that trains, "
            "and the random generators that "
        )
        what += "a Dataset draws from are of all threads"
        raise UserError(
            what,
            config.where(f"data.{key}"),
            f"leave data.{key} out, or data.workers=1: worker processes read ahead",
        )


def _check_lengths(config: Config, train: Source, task: Task) -> None:
    """Raises UserError where samples of different lengths come to a task or a model that takes
    those of one."""
    where = config.where("data.pad")
    named = task.name
    if config.data.pack is not None and not task.takes_lengths:
        what = "data.pack packs tokens for task.name=language, and this job has a loss of a script"
        raise UserError(
            what,
            config.where("data.pack"),
            "task.name=language without a loss; or data.pad={tokens: 0}, and the loss",
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
                f"task.name={named} takes {name} of one length, and data.pad pads it to the "
                "longest of a pass"
            )
            by_model = (
                f"a model whose forward() has the parameters {name} and {field.padding.mask}; "
                if name != "y"
                else ""
            )
            raise UserError(
                what,
                where,
                f"{by_model}a loss of your own, which gets {field.padding.mask} too; or "
                "task.name=language",
            )
        if not task.takes_lengths and not is_users_model(config.model):
            what = (
                f"model.name={config.model.name} takes samples of one length, and data.pad pads "
                f"{name} to the longest of a pass"
            )
            raise UserError(
                what,
                where,
                "a model of your own, hvdtrain.train(model=...); or model.name=gpt with "
                "task.name=language",
            )


def build_source(config: Config, split: Split, codebook: CommonCodebook | None = None) -> Source:
    """One of the two sets. It needs no ranks: missing data is reported before any rank waits for
    another. Raises UserError.

    codebook: of image tokens; without it, this process makes one of the training images.
    """
    codebook = codebook or CommonCodebook(SingleProcessCommunicator())
    if config.data.val_share is not None:
        source = getattr(_divided(config, config.data.val_share, codebook), split)
    else:
        source = _open(config, split, codebook)
    return _packed(config, source, "training" if split == "train" else "validation")


def _packed(config: Config, source: Source, name: str) -> Source:
    """The set in rows of data.pack tokens. Raises UserError as packed()."""
    return (
        source
        if config.data.pack is None
        else packed(source, config.data.pack, name, config.where("data.pack"))
    )


def _divided(config: Config, val_share: float, codebook: CommonCodebook) -> Division:
    """The training set in two parts: by class where its labels are known."""
    source = _open(config, "train", codebook)
    labels = None if config.task.name == "regression" else source.known_labels()
    return divide(
        source,
        val_share,
        labels if labels is not None and _are_classes(config, source, labels) else None,
    )


def _are_classes(config: Config, source: Source, labels: np.ndarray) -> bool:
    """Whether integers y are classes: as the task, the data or the loss say, or since they are no
    more than the samples that validate."""
    task = config.task.name
    if (
        task == "classification"
        or source.fields["y"].values
        or (is_object(task) and class_of_object(task) in _LOSSES_OF_CLASSES)
    ):
        return True
    return len(np.unique(labels)) <= (config.data.val_share or 0.0) * len(labels)


def _open_sources(config: Config, codebook: CommonCodebook) -> Division:
    """Both sets. Raises UserError, for class folders that do not fit before an image is decoded."""
    if config.data.val_share is not None:
        return _divided(config, config.data.val_share, codebook)
    check_splits = (
        None
        if plugins.is_users_own(config.data)
        else getattr(_plugin(config), "check_splits", None)
    )
    if check_splits:
        check_splits(_root(config))
    return Division(
        *bounded_alike(_open(config, "train", codebook), _open(config, "val", codebook))
    )


def _plugin(config: Config) -> ModuleType:
    return plugins.load("data/datasets", config.data.name, config.where("data.name"))


def _root(config: Config) -> Path | None:
    return Path(config.data.root).expanduser() if config.data.root else None


def _open(config: Config, split: Split, codebook: CommonCodebook) -> Source:
    """A set as the plugin of data.name gives it. Raises UserError."""
    if plugins.is_users_own(config.data):
        return _open_own(config, split)
    if config.data.pad or config.data.mask or config.data.pack is not None:
        if config.data.pad:
            key = "data.pad"
        elif config.data.mask:
            key = "data.mask"
        else:
            key = "data.pack"
        what = (
            f"{key} is of data of your own whose samples have different lengths; those of "
            f"data.name={config.data.name} have one"
        )
        raise UserError(
            what,
            config.where(key),
            "leave it out; or a torch Dataset, or a dict with a list of arrays",
        )
    make = _plugin(config).build
    options = plugins.convert_options(config.data, "data/datasets")
    _check_workers(config, make, options)
    root = _root(config)
    if config.data.stage is not None:
        root, options = stage_data(
            config.data.name, root, options, config.data.stage, config.where("data.stage")
        )
    found: Source | UnencodedImages = make(config.data.name, root, split, **options)
    if isinstance(found, UnencodedImages):
        images = found
        return codebook.encode(
            images,
            lambda: (
                images if split == "train" else make(config.data.name, root, "train", **options)
            ),
        )
    if isinstance(found, ImageSource):
        found = found.cropped(config.augment.resized_crop)
        return found.read_by(config.data.workers) if config.data.workers else found
    return read_by(found, config.data.workers) if config.data.workers else found


def _check_workers(
    config: Config, make: Callable[..., object], options: Mapping[str, object]
) -> None:
    """Raises UserError where there is nothing that worker processes would read. make: build() of
    the data set."""
    # of a data set of image files, else None
    packed = options.get("packed", _default_of(make, "packed"))
    if config.data.workers is None or packed is False or _default_of(make, "cache_mb"):
        return
    what = (
        f"data.workers={config.data.workers} are processes that decode images or read a Dataset "
        "of your own; "
    )
    what += f"data.name={config.data.name} has " + (
        "its pixels in array files (data.packed=true)" if packed else "threads"
    )
    fix = (
        "data.packed=false, or leave data.workers out"
        if packed
        else "data.readers=N, or leave it out"
    )
    raise UserError(what, config.where("data.workers"), fix)


def _default_of(make: Callable[..., object], option: str) -> object:
    """Default of a parameter; None where there is none of that name."""
    parameter = inspect.signature(make).parameters.get(option)
    return None if parameter is None else parameter.default


def _open_own(config: Config, split: Split) -> Source:
    """What the user's own package.module:function gives, which gets split and root where its
    parameters have these names.

    Raises UserError where that is nothing that as_source() knows.
    """
    where = config.where("data.name")
    if config.data.stage is not None:
        raise UserError(
            "data.stage copies the files of hvdtrain's own data sets",
            config.where("data.stage"),
            "leave it out",
        )
    found = plugins.call_own(
        config.data, {"name": config.data.name, "root": _root(config), "split": split}
    )
    return as_source(
        found,
        f"{config.data.name}, {split}",
        where,
        config.data.workers,
        names_to_keep(config),
        padding_of(config),
    )


def padding_of(config: Config) -> dict[str, Padding]:
    """What data.pad and data.mask say; with data.pack that of its tokens. Raises UserError where
    they do not fit each other."""
    pad = config.data.pad
    masks = config.data.mask
    if other := next((name for name in masks if name not in pad), None):
        what = f"data.mask names the mask of {other}, which data.pad does not have"
        raise UserError(
            what, config.where("data.mask"), f"data.pad={{{other}: 0}}, or leave it out"
        )
    if config.data.pack is not None:
        return dict(PADDING)
    return {name: Padding(value, masks.get(name, f"{name}_mask")) for name, value in pad.items()}


def unstaged(config: Config) -> Config:
    """For commands that train nothing: data are read where they are, and not copied to
    data.stage."""
    return config.replace(data=config.data.replace(stage=None))


def unwritten(config: Config, scratch: Path) -> Config:
    """For commands that describe a job: data are read where they are, and not downloaded, staged or
    packed.

    An index of archives is made in `scratch`, which the command removes.
    """
    data = config.data.replace(stage=None)
    if plugins.is_users_own(data):
        return config.replace(data=data)
    changed = _unwritten_options(data.name, config.where("data.name"), scratch)
    if isinstance(source := data.options.get("source"), str):
        of_source = _unwritten_options(source, config.where("data.name"), scratch)
        changed["source_options"] = {**(data.options.get("source_options") or {}), **of_source}
    return config.replace(data=data.with_options(**changed))


def _unwritten_options(name: str, where: str, scratch: Path) -> dict[str, Any]:
    """Options of a data set by which it writes nothing outside of `scratch`."""
    known = inspect.signature(plugins.load("data/datasets", name, where).build).parameters
    return {
        option: value
        for option, value in {"download": False, "packed": False, "cache": f"{scratch}"}.items()
        if option in known
    }


def published(config: Config) -> tuple[int, tuple[int, int, int], int] | None:
    """Samples, shape of an image and classes of the whole training set that data.name names, where
    they are known without its files."""
    if plugins.is_users_own(config.data) or config.data.val_share is not None:
        return None
    sizes: tuple[int, tuple[int, int, int], int] | None = getattr(
        _plugin(config), "TRAINING", {}
    ).get(config.data.name)
    return sizes


def with_blocks(config: Config, source: Source) -> Config:
    """The configuration with the block of data.shuffle=blocks: what the files have in a chunk or
    row group, where the user gives none."""
    if config.data.shuffle != "blocks" or config.data.shuffle_block is not None:
        return config
    files = stored_in(source)
    block = None if files is None else files.rows_of_block
    return config.replace(data=config.data.replace(shuffle_block=block or DEFAULT_BLOCK))


def with_class_names(config: Config, source: Source) -> Config:
    """The configuration with the names of the classes, where the data set or the user gives them.

    Raises UserError where both do and they differ, and where there are not as many names as
    classes.
    """
    where = config.where("data.class_names")
    own = list(getattr(source, "class_names", ()))
    if not isinstance(source, LabelledImages) and not own:
        if config.data.class_names is None:
            return config
        raise UserError("the data have no classes to name", where, "leave data.class_names out")
    given = config.data.class_names
    if given is None:
        return (
            config.replace(data=config.data.replace(class_names=own))
            if own and _fit_into_file(own)
            else config
        )
    if own and given != own:
        wrong = next(
            (
                f"class {label} is {name}"
                for label, name in enumerate(own)
                if name not in given[label : label + 1]
            ),
            "it has fewer",
        )
        raise UserError(
            f"data.class_names differs from the data set: {wrong}",
            where,
            "leave it out, or give data.root the data it is of",
        )
    classes = source.classes if isinstance(source, LabelledImages) else len(own)
    if len(given) != classes:
        raise UserError(
            f"{len(given)} names for {classes} classes",
            where,
            "one name for each class, by label",
        )
    return config


def _fit_into_file(names: Sequence[str]) -> bool:
    """Whether config.yaml can hold them and be read again."""
    return sum(len(json.dumps(name)) + 8 for name in names) < MOST_BYTES // 2 and not any(
        "${" in name for name in names
    )


def notes(config: Config, datasets: Datasets) -> list[str]:
    """Lines for the user about data that may not be what was meant."""
    train, val, task, _ = datasets
    lines = list(
        dict.fromkeys(line for source in (train, val) for line in source.notes)
    ) + _notes_on_blocks(config, train)
    lines += notes_on_fields(config, train, task.fields)
    lines += task.notes
    if (
        config.data.val_share is not None
        and _has_hidden_labels(train)
        and task.name != "regression"
    ):
        lines.append(
            "data.val_share takes of all samples alike, not of each class: labels are read with "
            "the samples (`targets` would have them)"
        )
    return lines + task.notes_on_data(train, val, has_given_stats=bool(config.data.mean))


def _notes_on_blocks(config: Config, train: Source) -> list[str]:
    """A line where blocks of files are decoded more than once in an epoch, for want of memory."""
    files = stored_in(train)
    if files is None or files.rows_of_block is None:
        return []
    shuffle = block_shuffle(config.data)
    cache_mb = files.samples.cache.most_bytes / 1e6
    samples = len(train) if shuffle is None else min(len(train), shuffle.block * shuffle.window)
    wanted_mb = samples * files.samples.bytes_of_sample / 1e6
    if wanted_mb <= cache_mb:
        return []
    of = "the training set" if shuffle is None else "a window of data.shuffle_window"
    fix = (
        "data.shuffle=blocks decodes each once"
        if shuffle is None
        else "a smaller window decodes each once"
    )
    often = (
        f"about {files.decodes_of_block(ranks_read_own_blocks(config)):.1f} times in an epoch"
        if shuffle is None
        else "again and again"
    )
    return [
        f"{of} is {wanted_mb:,.0f} MB, and data.cache_mb={cache_mb:,.0f}: blocks are decoded "
        f"{often}; {fix}, or a larger cache"
    ]


def _has_hidden_labels(source: Source) -> bool:
    """Whether samples have an integer y that is known only when they are read."""
    y = source.fields.get("y")
    return (
        y is not None
        and not y.shape
        and np.dtype(y.dtype).kind in "iu"
        and source.known_labels() is None
    )


def data_facts(config: Config, datasets: Datasets) -> dict[str, Any]:
    """What of the data must be equal on all ranks, by the name that a message gives it."""
    task = datasets.task
    train = datasets.train
    val = datasets.val
    return {
        "training samples": len(train),
        "validation samples": len(val),
        **{_FACT_NAMES.get(name, name + _OF_TASK): value for name, value in task.facts().items()},
        **digests(train, "training", config.seed),
        **(
            {}
            if (known := train.foresight) is None
            else {"samples in a block of the training files": known.rows}
        ),  # by which ranks divide
        **(
            {}
            if datasets.draws is None
            else {"data.sample_weights": digest({"weights": datasets.draws.weights})}
        ),
        **digests(val, "validation", config.seed),
    }


def facts_of_task(found: dict[str, Any]) -> dict[str, Any]:
    """Task.facts() again, from data_facts()."""
    names = {shown: name for name, shown in _FACT_NAMES.items()}
    facts = {
        names.get(shown, shown.removesuffix(_OF_TASK)): value for shown, value in found.items()
    }
    return {name: facts[name] for name in facts if name in _FACT_NAMES or name + _OF_TASK in found}


def digests(source: Source, name: str, seed: int) -> dict[str, Any]:
    """Digests of labels and images, or of arrays, by the name that a message gives them."""
    return {f"digest of the {name} {part}": value for part, value in source.digests(seed).items()}


def identity(config: Config, datasets: Datasets) -> Identity:
    """What a checkpoint keeps, to be compared at a resume: the seed and the training set, of which
    all labels."""
    task = datasets.task
    # a checkpoint that names no task is of classification
    named = {} if task.name == Classification.name else {"task": task.name}
    data = {"samples": len(datasets.train), **named, **task.facts(), **datasets.train.identity()}
    version = shuffle_version(len(datasets.train))
    if config.data.shuffle == "blocks":
        version = f"{BLOCKS_VERSION} {config.data.shuffle_block} x {config.data.shuffle_window}"
    if datasets.draws is not None:
        version = f"data.sample_weights {digest({'weights': datasets.draws.weights})}"
    if version is not None:
        data["shuffle"] = version
    return {"seed": config.seed, "data": data}


class CommonCodebook:
    """Made when it is needed first, of the training images; or read from a run folder."""

    def __init__(self, communicator: Communicator, run: Path | None = None) -> None:
        self._communicator = communicator
        self._run = run
        self._found: Codebook | None = None

    def encode(self, images: UnencodedImages, train: Callable[[], UnencodedImages]) -> TokenImages:
        """Every rank calls it. train() gives the training images. Raises UserError where there is
        no codebook, or it does not fit."""
        if self._found is None:
            run = self._run
            self._found = self._of_rank_0(
                (lambda: train().make_codebook()) if run is None else (lambda: read_codebook(run))
            )
        return images.encode(self._found)

    def _of_rank_0(self, make: Callable[[], Codebook]) -> Codebook:
        made = on_rank_0_only(self._communicator, make)
        shape = self._communicator.broadcast_object(None if made is None else made.colours.shape)
        colours = np.zeros(shape, np.uint8) if made is None else made.colours
        return Codebook(self._communicator.broadcast(colours, "codebook"))


def write_codebook(codebook: Codebook, run: Path) -> None:
    """Writes codebook.json, whole or not at all. Raises OSError."""
    with Folder.open(run) as folder:
        folder.replace(FILE, to_json(codebook))


def read_codebook(run: Path) -> Codebook:
    """Raises UserError where the file is absent or damaged."""
    try:
        with Folder.open(run) as folder:
            content = folder.read(FILE, MOST_FILE_BYTES)
    except OSError as error:
        what = f"the codebook cannot be read: {error.strerror or error}"
        raise UserError(
            what, str(run / FILE), "restore it from a copy; without it, colours are unknown"
        ) from None
    return from_json(content, str(run / FILE))
