"""hvdtrain lr-find: the learning rate range test: a few steps at rates that rise from step to step,
a curve of the loss, and a proposal."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.cli.options import CommandParser
from hvdtrain.cli.output import STANDARD_OUTPUT, align, print_result, with_json_value
from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import allreduce_sums, on_rank_0
from hvdtrain.config.exclusion import as_set, default_of
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.recipe import RecipeConfig
from hvdtrain.core.progress import fold
from hvdtrain.errors import DONE, UserError
from hvdtrain.extras.bench.lr_figure import draw_rates
from hvdtrain.extras.bench.options import two_or_more
from hvdtrain.extras.bench.trainer import Trainer, run_on_ranks
from hvdtrain.features.every_feature import FEATURES, configure
from hvdtrain.recipe.clock import base_batch
from hvdtrain.recipe.recipe import scaling
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.pretrained import load_pretrained
from hvdtrain.training.replicas.broadcast import broadcast_state
from hvdtrain.training.start import begin_with_samples

USAGE = """\
hvdtrain lr-find [--from 1e-6] [--to 10] [--steps 100] [--png FILE] [--json [FILE]] [--config FILE] [key=value ...]
  trains for a few steps, with a learning rate that is multiplied by the same factor from step to step, and proposes one where the loss
  falls fastest; under mpirun too. Nothing is written but FILE
  --from 1e-6, --to 10       values of optim.base_lr; recipe.scale applies, the other keys of recipe do not
  --steps 100                steps; it ends before where the loss is four times its lowest value
  --png FILE                 a picture of loss over rate
  --json FILE                the numbers as JSON; --json or --json - prints them instead of the text"""  # noqa: E501
# the mean loss of a step is over the steps before and after it, this part of all steps each, so
# that it has no lag
WINDOW = 25
RECENT = 0.8  # share of the mean before in the next one, of the loss that ends the test
DIVERGED = 4.0  # times the lowest such loss: the end
_SHOWN = 16  # lines of the table
_LEAST = 10  # points that a proposal needs


class Point(NamedTuple):
    """The learning rate and the loss of one step."""

    rate: float  # instead of optim.base_lr
    loss: float  # mean over the samples of the step on all ranks
    smoothed: float  # mean over the steps around it


class Proposal(NamedTuple):
    """The proposed values of optim.base_lr."""

    steepest: float  # rate at which the smoothed loss falls fastest over the logarithm of the rate
    lowest: float  # rate at which it is lowest


def lr_find(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code. Every rank calls it, rank 0 prints. Raises
    UserError.

    Source: Smith 2017, arXiv:1506.01186, 3.3, with a rate that rises exponentially.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    parser = CommandParser("lr-find")
    parser.add_argument("--config")
    parser.add_argument("--json")
    parser.add_argument("--png")
    parser.add_argument("--from", dest="least", type=_rate, default=1e-6)
    parser.add_argument("--to", dest="most", type=_rate, default=10.0)
    parser.add_argument("--steps", type=two_or_more, default=100)
    options, overrides = parser.parse_known_args(with_json_value(arguments))
    if options.least >= options.most:
        raise UserError(
            f"--from {options.least:g} is not below --to {options.most:g}",
            parser.where,
            "--from 1e-6 --to 10",
        )
    if options.steps < 2 * _LEAST:
        raise UserError(
            f"--steps {options.steps} are too few for a curve", parser.where, "--steps 100"
        )
    config = configure(options.config, overrides)
    for feature in FEATURES:
        key = feature.key
        if feature.on(config) and not feature.has_common_steps:
            what = (
                "lr-find makes one step of all ranks after the other, which "
                f"{as_set(config, key)} does not"
            )
            raise UserError(what, config.where(key), f"{key}={default_of(key)}")
    config = config.replace(
        recipe=_plain(config.recipe), optim=config.optim.replace(base_lr=options.most)
    )

    def work(communicator: Communicator, engine_reason: str) -> None:
        with Signals(communicator.rank) as signals:
            points = measure(config, communicator, signals, options.least, options.steps)
        if communicator.rank == 0:
            _show(points, config, options.json, options.png)

    return run_on_ranks(config, work)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"{text!r:.40} is not a learning rate", "--from, --to", "a number above 0")
    return value


def _plain(recipe: RecipeConfig) -> RecipeConfig:
    """Returns the recipe with a constant rate and batch."""
    return RecipeConfig(
        scale=recipe.scale, sample_noise=recipe.sample_noise, gradient_noise=recipe.gradient_noise
    )


def measure(
    config: Config, communicator: Communicator, signals: Signals, least: float, steps: int
) -> list[Point]:
    """Returns the loss at each rate from `least` to optim.base_lr, the same on every rank. A
    collective."""
    trainer = Trainer(config, communicator, signals)
    for line in _begin(trainer, communicator):
        print(f"lr-find: {line.strip()}", file=sys.stderr, flush=True)
    job = trainer.job
    progress = trainer.now.progress
    scale = scaling(config.recipe.scale, job.config.batch.size, base_batch(job.config))
    rates = list[float]()
    losses = list[float]()
    recent = list[float]()
    for number in range(steps):
        rate = least * (config.optim.base_lr / least) ** (number / (steps - 1))
        hyper, micro_batches = job.prefetcher.take(progress)
        sums = job.learner.step(
            micro_batches, hyper._replace(lr=rate * scale), fold(job.config.seed, progress.step)
        )
        total = allreduce_sums(
            communicator,
            {name: sums[name] for name in (*job.task.sums, "count")},
            "lr_find.sums",
            job.task.sums,
        )
        loss = float(next(metric for metric in job.task.metrics if metric.name == "loss").of(total))
        rates.append(rate)
        losses.append(loss)
        recent.append(RECENT * recent[-1] + (1 - RECENT) * loss if recent else loss)
        if not recent[-1] <= DIVERGED * min(recent):  # also true for NaN
            break
        progress = progress.advance(hyper.batch)
        if communicator.rank == 0 and number % 25 == 24:
            print(
                f"lr-find: step {number + 1} of {steps}, rate {rate:.3g}, loss {loss:.4g}",
                file=sys.stderr,
                flush=True,
            )
    trainer.prefetcher.close()
    return smooth(rates, losses)


def _begin(trainer: Trainer, communicator: Communicator) -> list[str]:
    """Gives the model a job's first weights: of samples, or pretrained ones. Lines for the user, on
    rank 0. A collective."""
    job = trainer.job
    datasets = trainer.datasets
    learner = trainer.job.learner
    if learner.first_samples:
        on_rank_0(communicator, lambda: begin_with_samples(job.config, datasets, learner))
        broadcast_state(communicator, learner, None)
    if job.config.model.weights is None:
        return []
    lines = load_pretrained(job.config, communicator, learner, lambda: None).lines
    return lines if communicator.rank == 0 else []


def smooth(rates: Sequence[float], losses: Sequence[float]) -> list[Point]:
    """Smooths losses by the mean over neighbouring steps, fewer at the ends."""
    half = max(1, len(rates) // WINDOW)
    near = [losses[max(0, number - half) : number + half + 1] for number in range(len(rates))]
    return [
        Point(rate, loss, sum(around) / len(around))
        for rate, loss, around in zip(rates, losses, near, strict=True)
    ]


def propose(points: Sequence[Point]) -> Proposal | None:
    """Returns the proposal; None if the loss never falls."""
    known = [point for point in points if math.isfinite(point.smoothed)]
    if len(known) < _LEAST:
        return None
    lowest = min(range(len(known)), key=lambda number: known[number].smoothed)
    slopes = [
        later.smoothed - earlier.smoothed
        for earlier, later in zip(known, known[2 : lowest + 1], strict=False)
    ]
    if not slopes or min(slopes) >= 0:
        return None
    return Proposal(known[slopes.index(min(slopes)) + 1].rate, known[lowest].rate)


def _show(points: Sequence[Point], config: Config, json_path: str | None, png: str | None) -> None:
    found = propose(points)
    every = -(-len(points) // _SHOWN)
    shown = [*points[:-1:every], points[-1]]
    lines = align(
        [
            ("rate", "loss", "smoothed"),
            *((f"{p.rate:.3g}", f"{p.loss:.4g}", f"{p.smoothed:.4g}") for p in shown),
        ],
        left=(),
    )
    if len(points) and points[-1].rate < config.optim.base_lr:
        lines.append(
            f"the loss grew to {DIVERGED:g} times its lowest value, or is not a number; the steps "
            "after it are excluded"
        )
    if found is None:
        lines += [
            "",
            "the loss falls at none of these rates: other --from and --to, or more --steps",
        ]
    else:
        lines += [
            "",
            f"optim.base_lr={found.steepest:.2g}   here the loss falls fastest",
            f"it is lowest at {found.lowest:.2g}: a tenth of that is {found.lowest / 10:.2g}",
        ]
    result = {
        "rates": [point.rate for point in points],
        "losses": [point.loss if math.isfinite(point.loss) else None for point in points],
        "smoothed": [point.smoothed if math.isfinite(point.smoothed) else None for point in points],
        "proposal": None if found is None else found._asdict(),
    }
    print_result(json_path, lines, result)
    if png is not None:
        title = (
            f"{config.model.name} on {config.data.name}, {config.optim.name}, batch "
            f"{config.batch.size}"
        )
        drawn = draw_rates(
            Path(png),
            title,
            [(p.rate, p.loss) for p in points],
            [(p.rate, p.smoothed) for p in points],
            found.steepest if found else None,
        )
        if json_path != STANDARD_OUTPUT:
            print(drawn)
