"""hvdtrain evaluate: loss and accuracy of a checkpoint on a data set, overall and for each class,
on any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.cli.output import print_result, with_json_value
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import COMMAND_LINE
from hvdtrain.core.extras import shows_run
from hvdtrain.core.process import command_line, path_argument
from hvdtrain.data.configured.unwritten import unstaged
from hvdtrain.data.option_error import NoValidationSet
from hvdtrain.data.source import Source, Split
from hvdtrain.errors import DONE, UserError, short
from hvdtrain.events.log import Event
from hvdtrain.events.writers import append_event, finite
from hvdtrain.extras.evaluate.class_results import evaluation_fields, evaluation_lines
from hvdtrain.extras.trained_models.arguments import Arguments, parse, read_former_run
from hvdtrain.extras.trained_models.evaluation import evaluate as evaluate_samples
from hvdtrain.extras.trained_models.fit import fit
from hvdtrain.extras.trained_models.saved_weights import load_model, run_folder
from hvdtrain.extras.trained_models.trained_model import TrainedModel, check_tokenizer
from hvdtrain.features.optim import EMA
from hvdtrain.training.common_array import CommonArray
from hvdtrain.training.data_facts import digests
from hvdtrain.training.datasets import build_source
from hvdtrain.training.failure import RankFailed
from hvdtrain.training.header import first_names
from hvdtrain.training.replicas.same_job import check_same_facts, facts
from hvdtrain.training.run_rank import ConnectedRank, on_connected_ranks

USAGE = """\
hvdtrain evaluate RUN [--split val] [--checkpoint newest] [--json [FILE]] [key=value ...]
  RUN            the run folder; the model and the data are those of its config.yaml
  --split        val, or train, without augmentation; default: val, and all samples of other data that have no validation set
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
    """Runs `evaluate` on this rank; returns the exit code. Raises UserError only for a mistake in
    the command line."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    parsed = parse(
        "evaluate",
        USAGE,
        with_json_value(arguments),
        {"--split": None, "--checkpoint": "", "--json": None},
    )
    if parsed.options["split"] not in ("train", "val", None):
        raise UserError(
            f"unknown split: {short(parsed.options['split'])}",
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
    model = load_model(rank, parsed)
    rank.heartbeat.beat("reading the data", 0, 0)
    source, split = _open(rank, config, parsed)
    source = fit(source, model.task, config)
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


def _open(rank: ConnectedRank, config: Config, parsed: Arguments) -> tuple[Source, str]:
    """Returns the samples, and the name of their split: val, train or all. Every rank calls it."""
    array = CommonArray(rank.communicator, run_folder(rank))
    asked: Split | None = parsed.options["split"]
    try:
        return build_source(config, asked or "val", array), asked or "val"
    except NoValidationSet:
        if asked is not None or config.origin("data.root") != COMMAND_LINE:
            raise
    return build_source(config, "train", array), "all"


def _facts(rank: ConnectedRank, model: TrainedModel, config: Config, split: str) -> dict[str, Any]:
    """Describes the evaluated model and the data."""
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
    averages = f", averages of {EMA.key}" if config.optim.averages else ""
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
    """Returns a line if the columns of a table differ from those the run has recorded by name."""
    columns = short(", ".join(source.columns.get("x", ())), 200)
    return (
        [f"         the run records no columns; x has them in this order: {columns}"]
        if columns
        else []
    )


def _record(run: Path, step: int, found: dict[str, Any]) -> list[str]:
    """Adds the event "evaluation" to the run; prints a line for people if it cannot."""
    try:
        append_event(run, Event(time.time(), "evaluation", step, found))
    except OSError as error:
        return [f"not added to {run / 'events.jsonl'}: {error.strerror or error}"]
    draws = [f": {command_line(name, path_argument(run))} draws it" for name in shows_run()]
    return [f"added to {run / 'events.jsonl'}{''.join(draws[:1])}"]
