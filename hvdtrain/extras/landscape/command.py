"""hvdtrain landscape: the loss around a run's weights, and on the line to those of another run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hvdtrain.cli.options import CommandParser
from hvdtrain.cli.output import align, print_result, with_json_value
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays
from hvdtrain.core.process import print_stderr
from hvdtrain.data.configured.unwritten import unstaged
from hvdtrain.data.sampler import evaluated_samples
from hvdtrain.data.source import Source
from hvdtrain.data.subset import subset
from hvdtrain.errors import DONE, UserError, short
from hvdtrain.extras.landscape.figure import Line, draw_lines
from hvdtrain.extras.landscape.model import Model
from hvdtrain.extras.landscape.surface import (
    AROUND,
    BETWEEN,
    Sharpness,
    along,
    between,
    filter_normalized,
    sharpness,
)
from hvdtrain.extras.trained_models.arguments import Arguments, parse, read_former_run
from hvdtrain.extras.trained_models.fit import fit
from hvdtrain.extras.trained_models.saved_weights import (
    find_checkpoint,
    load_checkpoint,
    run_folder,
)
from hvdtrain.extras.trained_models.trained_model import TrainedModel, load_trained_model
from hvdtrain.training.build import restore_task
from hvdtrain.training.common_array import CommonArray
from hvdtrain.training.datasets import build_source
from hvdtrain.training.failure import RankFailed
from hvdtrain.training.run_rank import ConnectedRank, on_connected_ranks

USAGE = """\
hvdtrain landscape RUN [RUN] [--split val] [--samples 2000] [--directions 3] [--epsilon 0.001] [--png FILE.png] [--json [FILE]] [key=value ...]
  RUN            a run folder. With two, of the same model: also the loss on the line between their weights, from -0.5 to 1.5
                 (0: the first run, 1: the second)
  --split        val, or train, without augmentation; of the data of the first run
  --samples      how many samples of it, chosen by the seed; 0: all
  --directions   random directions around each run's weights, in which each filter is as long as that of the weights (Li 2018,
                 arXiv:1712.09913); 0: none
  --epsilon      sharpness (Keskar 2017, arXiv:1609.04836): by how much the loss rises if each number x of the weights moves by at most
                 epsilon (|x| + 1); 0: not measured
  --checkpoint   newest, best, or the name of one
  --png          default: landscape.png in the first run folder
  --json         write the result to FILE too, as one JSON object; --json or --json - prints it instead of the lines
  key=value      as for evaluate: speed.*, comm.*, batch.evaluate
Under mpirun each rank evaluates its share. Batch norm keeps the running statistics of the checkpoint, and those between two runs are
interpolated; model.norm=false avoids the question."""  # noqa: E501


class _Asked(NamedTuple):
    """What the command line asks for."""

    parsed: Arguments  # of the first run
    other: str | None  # the second run
    samples: int
    directions: int
    epsilon: float


def landscape(arguments: Sequence[str]) -> int:
    """Runs `landscape` on this rank; returns the exit code. Raises UserError only for a mistake in
    the command line."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    asked = _parse(arguments)
    try:
        return on_connected_ranks(
            lambda rank: _landscape(rank, asked),
            None,
            asked.parsed.of_job(),
            read_former_run=read_former_run,
            what="landscape",
        )
    except RankFailed as failed:
        return failed.code


def _parse(arguments: Sequence[str]) -> _Asked:
    parser = CommandParser("landscape", USAGE.partition("\n")[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--split", choices=("train", "val"), default="val")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--directions", type=int, default=3)
    parser.add_argument("--epsilon", type=float, default=1e-3)
    for name in ("--checkpoint", "--png", "--json"):
        parser.add_argument(name)
    found = parser.parse_intermixed_args(with_json_value(arguments))
    runs = [word for word in found.words if "=" not in word]
    if len(runs) not in (1, 2):
        parser.error(f"one RUN or two are needed, not {len(runs)}: {short(' '.join(runs))}")
    if found.samples < 0 or found.directions < 0 or not 0 <= found.epsilon < 1:
        parser.error("--samples and --directions take 0 or more, --epsilon 0 or more, below 1")
    overrides = [word for word in found.words if "=" in word]
    of_first = parse("landscape", USAGE, [runs[0], *overrides], {})
    parsed = of_first._replace(
        options={
            "split": found.split,
            "checkpoint": found.checkpoint or "",
            "png": found.png,
            "json": found.json,
        }
    )
    other = runs[1] if len(runs) == 2 else None
    return _Asked(parsed, other, found.samples, found.directions, found.epsilon)


def _landscape(rank: ConnectedRank, asked: _Asked) -> int:
    options = asked.parsed.options
    config = unstaged(rank.config)
    trained = load_checkpoint(rank, options["checkpoint"])
    if trained.learner.is_sharded:
        raise UserError(
            "landscape replaces the weights, which need to be whole on each rank",
            config.where("shard.stage"),
            "shard.stage=0",
        )
    if "loss" not in [metric.name for metric in trained.task.metrics]:
        raise UserError(
            f"task.name={config.task.name} has no metric named loss",
            config.where("task.name"),
            "a task of hvdtrain, or a metric with this name",
        )
    rank.heartbeat.beat("reading the data", 0, 0)
    source = _source(rank, config, trained, asked)
    model = Model(config, trained, source, rank.communicator, rank.heartbeat)
    runs = {str(run_folder(rank)): model.weights()}
    if asked.other is not None:
        first = next(iter(runs.values()))
        runs[asked.other] = _weights_of(rank, config, asked.other, options["checkpoint"])
        _refuse_other_shapes(first, runs[asked.other], asked.other)
    lines, sharp = _measure(model, runs, asked, config.seed)
    if rank.communicator.rank:
        return DONE
    picture = Path(os.path.expanduser(options["png"] or run_folder(rank) / "landscape.png"))
    samples = f"{len(source):,} samples of {config.data.name}, {options['split']}"
    printed = [
        f"data     {samples}; the data and the task are those of {next(iter(runs))}",
        *(f"         {note}" for note in trained.notes),
        *_table(lines, sharp),
        draw_lines(picture, samples, lines, sharp),
    ]
    result = {
        "runs": list(runs),
        "samples": len(source),
        "split": options["split"],
        "lines": [line._asdict() for line in lines],
        "sharpness": {run: found._asdict() for run, found in sharp.items()},
        "epsilon": asked.epsilon,
    }
    print_result(options["json"], printed, result)
    return DONE


def _source(rank: ConnectedRank, config: Config, trained: TrainedModel, asked: _Asked) -> Source:
    array = CommonArray(rank.communicator, run_folder(rank))
    source = build_source(config, asked.parsed.options["split"], array)
    source = fit(source, trained.task, config)
    if asked.samples and asked.samples < len(source):
        source = subset(source, evaluated_samples(len(source), asked.samples, config.seed))
    return source


def _weights_of(rank: ConnectedRank, config: Config, run: str, which: str) -> Arrays:
    """Returns the weights and buffers of another run of this model. Every rank calls it. Raises
    UserError if it is another model."""
    folder = Path(os.path.expanduser(run))
    found = load_trained_model(
        config,
        rank.communicator,
        lambda reading: find_checkpoint(folder, which, reading),
        restore_task,
        rank.heartbeat.go_on,
    )
    state = found.learner.state()
    return {name: np.array(array) for name, array in state.items() if name[:2] != "s."}


def _refuse_other_shapes(first: Arrays, other: Arrays, run: str) -> None:
    for name, array in first.items():
        if name not in other or other[name].shape != array.shape:
            found = other[name].shape if name in other else "missing"
            raise UserError(
                f"{name[2:]} is {array.shape} in the first run and {found} in {run}",
                "RUN",
                "two runs of the same model and data with the same classes",
            )


def _measure(
    model: Model, runs: dict[str, Arrays], asked: _Asked, seed: int
) -> tuple[list[Line], dict[str, Sharpness]]:
    """Returns the lines and the sharpness of each run. Every rank calls it."""
    lines = []
    if len(runs) == 2:
        first, second = runs.values()
        points = [between(first, second, float(share)) for share in BETWEEN]
        lines.append(_line("between the runs", BETWEEN, model, points))
        _tell(model, lines[-1].name)
    sharp = {}
    for run, weights in runs.items():
        rng = np.random.default_rng(seed)  # the same directions for each run
        for number in range(asked.directions):
            direction = filter_normalized(weights, rng)
            points = [along(weights, direction, float(distance)) for distance in AROUND]
            lines.append(_line(f"{run}, direction {number + 1}", AROUND, model, points))
            _tell(model, lines[-1].name)
        if asked.epsilon:
            sharp[run] = sharpness(weights, asked.epsilon, model.loss, model.gradient)
            _tell(model, f"sharpness of {run}")
    return lines, sharp


def _tell(model: Model, what: str) -> None:
    """Prints progress on rank 0."""
    if not model.communicator.rank:
        print_stderr(f"measured: {what}", 1.0)


def _line(name: str, at: np.ndarray, model: Model, points: Sequence[Arrays]) -> Line:
    found = [model.metrics(point) for point in points]
    second = next((metric for metric in found[0] if metric != "loss"), None)
    return Line(
        name,
        [float(one) for one in at],
        [one["loss"] for one in found],
        second,
        [] if second is None else [one[second] for one in found],
    )


def _table(lines: Sequence[Line], sharp: dict[str, Sharpness]) -> list[str]:
    rows: list[list[str]] = []
    if lines:
        rows.append(["line", "loss at -0.5", "0", "0.5", "1", "largest"])
        rows += [
            [
                line.name,
                *(f"{line.loss_at(x):.4g}" for x in (-0.5, 0.0, 0.5, 1.0)),
                f"{max(line.loss):.4g}",
            ]
            for line in lines
        ]
    found = align(rows) if rows else []
    return [
        *found,
        *(
            f"sharpness of {run}: {one.percent:.3g} % (loss {one.loss:.4g}, "
            f"at most {one.largest:.4g} in the box)"
            for run, one in sharp.items()
        ),
    ]
