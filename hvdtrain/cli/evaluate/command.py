"""hvdtrain evaluate: loss and accuracy of a checkpoint on a data set, of each class too, on any
number of ranks."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.cli.options import CommandParser
from hvdtrain.cli.output import print_result, with_json_value
from hvdtrain.cli.saved_weights import read_checkpoint
from hvdtrain.config.read import Assignment, read_argument, read_resumed
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import Given, is_object
from hvdtrain.core.process import command_line, path_argument
from hvdtrain.data.configured.unwritten import unstaged
from hvdtrain.data.source import LabelledImages, Source
from hvdtrain.data.stored.source import stored_in
from hvdtrain.data.subset import relabelled, relabelled_rows
from hvdtrain.data.user_data.as_source import as_declared
from hvdtrain.errors import DONE, UserError, nearest, short
from hvdtrain.events.log import Event
from hvdtrain.events.writers import append_event, finite
from hvdtrain.tasks.classification import classes_of
from hvdtrain.tasks.rows import name_of_class
from hvdtrain.tasks.task import Task
from hvdtrain.training.build import restore_task
from hvdtrain.training.common_array import CommonArray
from hvdtrain.training.data_facts import digests
from hvdtrain.training.datasets import build_source
from hvdtrain.training.evaluate import ClassCounts, Evaluation
from hvdtrain.training.evaluate import evaluate as evaluate_samples
from hvdtrain.training.failure import RankFailed
from hvdtrain.training.header import first_names
from hvdtrain.training.replicas.same_job import check_same_facts, facts
from hvdtrain.training.run_rank import ConnectedRank, on_connected_ranks
from hvdtrain.training.trained_model import (
    TrainedModel,
    check_tokenizer,
    load_trained_model,
)

USAGE = """\
hvdtrain evaluate RUN [--split val] [--checkpoint newest] [--json [FILE]] [key=value ...]
  RUN            the run folder; the model and the data are those of its config.yaml
  --split        val (default), or train, without augmentation
  --checkpoint   newest, best (by the task's objective), or the name of one: step-00000120; default: newest, and of a run with
                 stop.restore_best best
  --json         write the result to FILE too, as one JSON object; --json or --json - prints it instead of the lines
  key=value      other data: data.root=DIR, data.name=...; and evaluate.views, batch.evaluate, speed.*, comm.*, shard.stage;
                 optim.ema=null: of a run with optim.ema the weights themselves, not their averages
Under mpirun each rank evaluates its share. The result is the same on any number of ranks, up to rounding of the loss; it is added to
RUN/events.jsonl, from which `report` draws it.
A run with shard.stage=3 is evaluated with it on several ranks: each has its parts of the weights (comm.engine=mpi or torchdist).
shard.stage=0 gives each rank the whole model, as one process has it."""  # noqa: E501


def evaluate(arguments: Sequence[str]) -> int:
    """Runs `evaluate` on this rank; returns the exit code. Raises UserError for a mistake in the
    command line alone."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    parsed = parse(
        "evaluate",
        USAGE,
        with_json_value(arguments),
        {"--split": "val", "--checkpoint": "", "--json": None},
    )
    if parsed.options["split"] not in ("train", "val"):
        raise UserError(
            f"no such part of a data set: {short(parsed.options['split'])}",
            "--split",
            "train or val",
        )
    try:
        return on_connected_ranks(
            lambda rank: _evaluate(rank, parsed),
            None,
            parsed.of_job(),
            read_former_run=read_former_run,
            what="evaluation",
        )
    except RankFailed as failed:
        return failed.code


def _evaluate(rank: ConnectedRank, parsed: Arguments) -> int:
    config = unstaged(rank.config)
    communicator = rank.communicator
    split = parsed.options["split"]
    model = load_model(rank, parsed)
    rank.heartbeat.beat("reading the data", 0, 0)
    source = fit(
        build_source(config, split, CommonArray(communicator, run_folder(rank))),
        model.task,
        config,
    )
    if config.data.name == "text":
        tokenizer = source.identity().get("tokenizer")
        check_tokenizer(model.checkpoint, tokenizer, config.where("data.tokenizer"))
    if communicator.size > 1:
        data = {"samples": len(source), **digests(source, split, config.seed)}
        check_same_facts(communicator, facts(config, data, communicator.name))
    began_s = time.perf_counter()
    evaluation = evaluate_samples(
        config, model.learner, source, model.task, communicator, rank.heartbeat
    )
    if communicator.rank:
        return DONE
    found = {
        **_facts(rank, model, config, split),
        **evaluation_fields(evaluation, config.data.class_names),
        "evaluate_s": round(time.perf_counter() - began_s, 3),
    }
    note = _record(run_folder(rank), model.checkpoint.train_state.progress.step, found)
    lines = [
        *model.notes,
        *_header(rank, model, source, config, split),
        *evaluation_lines(evaluation, config.data.class_names),
        *note,
    ]
    print_result(parsed.options["json"], lines, finite(found))
    return DONE


def load_model(rank: ConnectedRank, parsed: Arguments) -> TrainedModel:
    """The model of the run with the weights of --checkpoint, on every rank or in parts. Every rank
    calls it. Raises UserError."""
    rank.heartbeat.beat("reading the checkpoint", 0, 0)
    return load_checkpoint(rank, parsed.options["checkpoint"])


def load_checkpoint(
    rank: ConnectedRank,
    which: str,
    restore: Callable[[Config, dict[str, Any]], Task] = restore_task,
) -> TrainedModel:
    """The model of a run with the weights of checkpoint `which`; restore: as
    load_trained_model()."""
    run = run_folder(rank)
    return load_trained_model(
        unstaged(rank.config),
        rank.communicator,
        lambda mapped, on_piece: read_checkpoint(run, which, mapped=mapped, on_piece=on_piece),
        restore,
        rank.heartbeat.go_on,
    )


def run_folder(rank: ConnectedRank) -> Path:
    return Path(os.path.expanduser(rank.config.resume))


def fit(source: Source, task: Task, config: Config) -> Source:
    """The source with the labels that the model knows its classes by. Raises UserError where the
    model cannot take its samples."""
    where = config.where("data.root")
    names = config.data.class_names
    has_one_input = task.transforms is None
    if task.class_label is None or not has_one_input or not isinstance(source, LabelledImages):
        return _with_fields_of(_with_classes_of(source, task, names, where), task, where)
    shape = task.fields["x"].shape
    label = task.fields[task.class_label]
    if source.shape != shape:
        what = (
            f"the images are {'x'.join(map(str, source.shape))}, the model takes "
            f"{'x'.join(map(str, shape))}"
        )
        raise UserError(
            what,
            where,
            f"data.size={shape[0]} and data.channels={shape[2]}, where data.name has "
            "them; or other data",
        )
    if names and source.class_names:
        _refuse_unknown(source.class_names, names, where)
        return as_declared(
            source if list(source.class_names) == names else relabelled(source, names), task.fields
        )
    if classes_of(source, label.ignored) > label.values:
        raise UserError(
            f"the data have {source.classes} classes, the model {label.values}",
            where,
            "data of the classes of the run",
        )
    return as_declared(source, task.fields)


def _with_classes_of(source: Source, task: Task, names: Sequence[str] | None, where: str) -> Source:
    """The source with the labels of the run's classes. Raises UserError where its names are not
    those of the run, or cannot be compared with them."""
    own = source.class_names
    if names and own:
        _refuse_unknown(own, names, where)
        return relabelled_rows(source, names)
    classes = 0 if task.class_label is None else task.fields[task.class_label].values
    if own and len(own) != classes:
        what = f"the data have {len(own):,} classes by name, the run {classes:,} without names"
        raise UserError(
            what, where, "data with all classes of the run (config.yaml has no very long lists)"
        )
    is_table = stored_in(source) is not None and not isinstance(source, LabelledImages)
    if names and is_table and task.class_label in source.fields:
        what = f"{task.class_label} has no names of classes, as the run has: {', '.join(names)}"
        what = short(what, 120)
        raise UserError(what, where, f"the names in {task.class_label}")
    return source


def _refuse_unknown(own: Sequence[str], names: Sequence[str], where: str) -> None:
    """Raises UserError where the data have classes that the model does not know."""
    if unknown := [name for name in own if name not in names]:
        what = f"the model does not know {', '.join(unknown[:5])}{', ...' if unknown[5:] else ''}"
        raise UserError(what, where, f"data of its classes: {short(', '.join(names))}")


def _with_fields_of(source: Source, task: Task, where: str) -> Source:
    """The source with integers as the task has them. Raises UserError where it lacks a field, or
    has it in another form."""
    for name, field in task.fields.items():
        found = source.fields.get(name)
        too_many = (
            found is not None
            and field.values
            and found.values > field.values
            and found.values - 1 != field.ignored
        )
        if found is None or not field.fits(found) or too_many:
            what = (
                f"the model takes {name} {field}, the data have "
                f"{f'it as {found}' if found else ', '.join(source.fields)}"
            )
            raise UserError(what, where, "data with the fields of the run")
    return as_declared(source, task.fields)


def _facts(rank: ConnectedRank, model: TrainedModel, config: Config, split: str) -> dict[str, Any]:
    """Which model was evaluated on which data."""
    return {
        "checkpoint": model.checkpoint.folder.name,
        "epochs": model.checkpoint.train_state.progress.epochs,
        "data": config.data.name,
        "root": config.data.root,
        "split": split,
        "views": config.evaluate.views,
        "ranks": rank.communicator.size,
    }


def _header(
    rank: ConnectedRank, model: TrainedModel, source: Source, config: Config, split: str
) -> list[str]:
    size = rank.communicator.size
    progress = model.checkpoint.train_state.progress
    data = f"{config.data.name}{f' in {config.data.root}' if config.data.root else ''}, {split}"
    views = f", {config.evaluate.views} views of each" if config.evaluate.views > 1 else ""
    averages = ", averages of optim.ema" if config.optim.ema is not None else ""
    described = model.learner.describe()
    return [
        f"ranks    {size}, engine {rank.communicator.name}: {rank.engine_reason}",
        f"model    {config.model.name}: "
        f"{described if model.learner.is_sharded else described.rpartition(', ')[0]}",
        f"weights  {run_folder(rank)}, step {progress.step}, epoch {progress.epochs:.2f}{averages}",
        f"data     {data}: {len(source):,} samples{views}, "
        f"{model.task.summary}{first_names(config.data.class_names)}",
        *(f"         {note}" for note in source.notes),
        *_in_order_of_the_file(source),
    ]


def _in_order_of_the_file(source: Source) -> list[str]:
    """A line where the columns of a table are not those that the run has recorded by name."""
    columns = short(", ".join(source.columns.get("x", ())), 200)
    return (
        [f"         the run records no columns; x has them in this order: {columns}"]
        if columns
        else []
    )


def _record(run: Path, step: int, found: dict[str, Any]) -> list[str]:
    """Adds the event "evaluation" to the run; a line for people where it cannot."""
    try:
        append_event(run, Event(time.time(), "evaluation", step, found))
    except OSError as error:
        return [f"not added to {run / 'events.jsonl'}: {error.strerror or error}"]
    return [
        f"added to {run / 'events.jsonl'}: {command_line('report', path_argument(run))} draws it"
    ]


_MOST_ROWS = 20  # classes on the screen: those with the lowest accuracy
_MOST_MATRIX = 100  # classes whose confusion matrix an event has
_MOST_PAIRS = 20  # pairs of classes that are taken for each other, in an event


def evaluation_fields(evaluation: Evaluation, class_names: Sequence[str] | None) -> dict[str, Any]:
    """Fields of the event "evaluation", beside those that say which model and data they are of."""
    of_all: dict[str, Any] = {**evaluation.metrics, "count": evaluation.samples}
    if evaluation.classes is None:
        return of_all
    confusion = evaluation.classes.confusion
    return {
        **of_all,
        "class_names": None if class_names is None else list(class_names),
        "class_samples": evaluation.classes.samples.tolist(),
        "class_accuracy": class_accuracies(evaluation.classes),
        "class_precision": class_precisions(confusion),
        "confusion": confusion.tolist()
        if confusion is not None and len(confusion) <= _MOST_MATRIX
        else None,
        "confused": most_confused(confusion, _MOST_PAIRS),
    }


def class_accuracies(counts: ClassCounts) -> list[float]:
    """Accuracy of each class; NaN where it has no samples."""
    pairs = zip(counts.right.tolist(), counts.samples.tolist(), strict=True)
    return [right / samples if samples else math.nan for right, samples in pairs]


def class_precisions(confusion: np.ndarray | None) -> list[float] | None:
    """How many of the samples that the model says are of a class are so; NaN where it says none,
    None without a confusion matrix."""
    if confusion is None:
        return None
    return [
        right / said if said else math.nan
        for right, said in zip(
            np.diagonal(confusion).tolist(), confusion.sum(0).tolist(), strict=True
        )
    ]


def most_confused(confusion: np.ndarray | None, most: int) -> list[list[int]]:
    """[label, what the model says, how often] of the most frequent mistakes, the most frequent
    first."""
    if confusion is None:
        return []
    wrong = confusion.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    rows, columns = np.unravel_index(order, wrong.shape)
    return [
        [int(row), int(column), int(wrong[row, column])]
        for row, column in zip(rows, columns, strict=True)
        if wrong[row, column]
    ]


def evaluation_lines(evaluation: Evaluation, class_names: Sequence[str] | None) -> list[str]:
    """The metrics, then a line for each class, of many classes for those with the lowest
    accuracy."""
    width = max(8, *(len(name) for name in evaluation.metrics))
    metrics = [f"{name:{width}} {value:.4f}" for name, value in evaluation.metrics.items()]
    if evaluation.classes is None:
        return metrics
    right = int(evaluation.classes.right.sum())
    count = int(evaluation.classes.samples.sum())
    metrics = [
        f"{line}: {right:,} of {count:,} right" if line.startswith("accuracy ") else line
        for line in metrics
    ]
    return [*metrics, *_class_lines(evaluation.classes, class_names)]


def _class_lines(counts: ClassCounts, class_names: Sequence[str] | None) -> list[str]:
    names = [name_of_class(label, class_names) for label in range(len(counts.samples))]
    accuracies = class_accuracies(counts)
    seen = [label for label in range(len(names)) if counts.samples[label]]
    shown = (
        seen
        if len(seen) <= _MOST_ROWS
        else sorted(seen, key=lambda label: accuracies[label])[:_MOST_ROWS]
    )
    width = max(5, *(len(names[label]) for label in shown))
    head = f"{'class':{width}}  samples  accuracy  most often taken for"
    rows = [
        f"{names[label]:{width}}  {counts.samples[label]:7,}  {accuracies[label]:8.4f}  "
        f"{_mistake(counts.confusion, label, names)}"
        for label in shown
    ]
    return [
        head,
        *(row.rstrip() for row in rows),
        *(
            [f"the {_MOST_ROWS} classes with the lowest accuracy, of {len(seen):,}"]
            if len(shown) < len(seen)
            else []
        ),
    ]


def _mistake(confusion: np.ndarray | None, label: int, names: list[str]) -> str:
    """Coat (31)"""
    if confusion is None:
        return ""
    said = confusion[label].copy()
    said[label] = 0
    return f"{names[int(said.argmax())]} ({said.max():,})" if said.any() else ""


# Keys of the run that say what its model is and what its data are. The others say how it was
# trained, which matters no more.
OF_A_FILE = Given("<object of hvdtrain:file>", lambda: None, {})  # predict --data FILE
TABLES = ("csv", "parquet")  # data sets whose columns have names
OF_ROWS = ("data.fields.", "data.delimiter")  # which columns of a file are inputs
_OF_THE_RUN = (
    "framework",
    "seed",
    "data.",
    "task.",
    "model.",
    "norm.",
    "speed.",
    "batch.evaluate",
    "evaluate.views",
    "optim.ema",
)
_OF_THE_COMMAND = (  # that may be given as key=value
    "data.",
    "task.",
    "model.",
    "speed.",
    "comm.",
    "guard.",
    "shard.stage",
    "shard.offload",
    "batch.evaluate",
    "evaluate.views",
    "optim.ema",
)


class Arguments(NamedTuple):
    """A command line: RUN, --name VALUE for each option, and key=value."""

    run: str
    options: Mapping[str, Any]
    overrides: list[str]

    def of_job(self) -> list[str]:
        """The arguments that make the configuration. batch.size, which is of training, is one
        sample a rank: any number of ranks fits."""
        return [f"resume={self.run}", *self.overrides, "batch.per_rank=1"]


def parse(
    command: str,
    usage: str,
    arguments: Sequence[str],
    options: Mapping[str, str | None],
    flags: Sequence[str] = (),
) -> Arguments:
    """options: {"--name": its default}; flags have no value. Raises UserError where the command
    line is not as `usage` says."""
    parser = CommandParser(command, usage.partition("\n")[0])
    for name, default in options.items():
        parser.add_argument(name, default=default)
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    parsed, rest = parser.parse_known_args(list(arguments))
    words = [argument for argument in rest if "=" not in argument]
    if unknown := [word for word in words if word.startswith("-")]:
        parser.error(
            f"unknown argument '{short(unknown[0])}': {nearest(unknown[0], [*options, *flags])}"
        )
    if len(words) != 1:
        taken = vars(parsed).get("json") or "-"
        missing = (
            "RUN is missing"
            if taken == "-"
            else f"RUN is missing: {short(taken)} is the FILE of --json"
        )
        parser.error(
            f"one RUN is needed, not {len(words)}: {short(' '.join(words))}" if words else missing
        )
    overrides = [argument for argument in rest if "=" in argument]
    for argument in overrides:
        given = read_argument(argument)
        if (
            given.key == "optim.ema" and given.value is not None
        ):  # no average is made here, of whatever decay
            what = (
                f"{command} takes no {short(argument)}: the averages of the weights are those of "
                "the run"
            )
            raise UserError(
                what,
                f"command line of {command}",
                "optim.ema=null for the weights themselves, or leave it out",
            )
        if not given.key.startswith(_OF_THE_COMMAND):
            what = f"{command} takes no {short(argument)}: it does not train"
            raise UserError(
                what,
                f"command line of {command}",
                f"keys of {', '.join(key.rstrip('.') for key in _OF_THE_COMMAND)}",
            )
    return Arguments(words[0], vars(parsed), overrides)


def read_former_run(assigned: Sequence[Assignment]) -> list[Assignment]:
    """What the configuration of the run says about its model and its data. Raises UserError where
    it cannot be read.

    Where the command names other data, only the names of the run's classes and the form of its
    images remain. Of shard.stage 3 remains: its model may fit no rank.
    """
    given = {assignment.key: assignment.value for assignment in assigned}
    # this machine may have fewer
    dropped = (
        "speed.devices",
        *["data.val_share"] * bool({"data.root", "data.name"} & given.keys()),
    )
    former = read_resumed(assigned)
    kept = [a for a in former if a.key.startswith(_OF_THE_RUN) and not a.key.startswith(dropped)]
    kept += [a for a in former if a.key == "shard.stage" and a.value == 3]
    recorded = {assignment.key: assignment.value for assignment in kept}
    if "data.name" in given and given["data.name"] != recorded.get(
        "data.name"
    ):  # its options are those of another data set
        remain: tuple[str, ...] = ("data.class_names",)
        name = given["data.name"]
        if recorded["data.name"] in TABLES and (name in TABLES or is_object(name)):
            remain += OF_ROWS if name == OF_A_FILE.name else OF_ROWS[:1]
        kept = [a for a in kept if not a.key.startswith("data.") or a.key.startswith(remain)]
    return kept
