"""bench data: how fast samples are read and prefetched, compared with how fast steps consume them.
Rank 0 prints its numbers."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdtrain.cli.output import align, plural, print_result
from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.data.sampler import positions_of_rank
from hvdtrain.data.source import Source
from hvdtrain.extras.bench.options import BenchParser, two_or_more
from hvdtrain.extras.bench.trainer import Trainer, quartiles, run_on_ranks
from hvdtrain.features.every_feature import configure
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.input import Prefetcher, block_shuffle

MAX_STEPS = 20  # steps in one block


def bench_data(arguments: Sequence[str]) -> int:
    """Runs `bench data`; returns the exit code. Every rank calls it, rank 0 prints. Raises
    UserError."""
    parser = BenchParser("data")
    parser.add_argument("--rounds", type=two_or_more, default=5)
    options, overrides = parser.parse_known_args(arguments)
    config = configure(options.config, overrides)

    def work(communicator: Communicator, engine_reason: str) -> None:
        with Signals(communicator.rank) as signals:
            result = measure(config, communicator, signals, options.rounds)
        if communicator.rank == 0:
            print_result(options.json, to_text(result), result)

    return run_on_ranks(config, work)


def measure(
    config: Config, communicator: Communicator, signals: Signals, rounds: int
) -> dict[str, Any]:
    """Returns the result of this rank, in the form of --json. A collective: every rank calls it."""
    began = time.perf_counter()
    datasets = open_datasets(config, communicator)
    prepared_s = time.perf_counter() - began
    trainer = Trainer(config, communicator, signals, datasets)
    samples_per_step = max(
        1, trainer.job.recipe.at(trainer.now.progress).batch // trainer.job.learner.data.size
    )
    steps = max(1, min(MAX_STEPS, len(datasets.train) // samples_per_step))
    prefetchers = _prefetchers(config, communicator, trainer)
    stages = _stages(trainer, prefetchers, samples_per_step, steps)
    seconds = _time_stages(stages, list(prefetchers.values()), communicator, rounds)
    for prefetcher in prefetchers.values():
        prefetcher.close()
    samples_per_s = {}
    for name, block_seconds in seconds.items():
        low_s, median_s, high_s = quartiles(block_seconds)
        images = steps * samples_per_step
        samples_per_s[name] = [images / high_s, images / median_s, images / low_s]
    return {
        "prepared_s": prepared_s,
        "samples": len(datasets.train),
        "shape": list(next(iter(datasets.task.fields.values())).shape),
        "samples_per_s": samples_per_s,
        "rounds": rounds,
        "batch_of_a_rank": samples_per_step,
        "ranks": communicator.size,
        "prefetch": trainer.prefetcher.summary,
    }


def _prefetchers(
    config: Config, communicator: Communicator, trainer: Trainer
) -> dict[str, Prefetcher]:
    """Returns prefetchers by name in the table: the job's, and with one and two readers if
    different."""
    prefetchers = {"prefetch": trainer.prefetcher}
    if trainer.prefetcher.cached_on_device:
        return prefetchers
    for readers in (1, 2):
        if trainer.prefetcher.ahead and trainer.prefetcher.readers == readers:
            continue
        data = trainer.job.config.data.replace(readers=readers, ahead=2 * readers, resident=False)
        changed = config.replace(data=data, batch=trainer.job.config.batch)
        name = f"prefetch, {plural(readers, 'reader')}"
        prefetchers[name] = Prefetcher(
            changed,
            communicator,
            trainer.job.recipe,
            trainer.datasets.train,
            trainer.job.learner,
            trainer.datasets.draws,
        )
    return prefetchers


def _stages(
    trainer: Trainer, prefetchers: Mapping[str, Prefetcher], samples_per_step: int, steps: int
) -> dict[str, Callable[[], None]]:
    """Returns the functions to time, by name: reading, prefetching, and the step itself. Each
    handles the samples of `steps` steps."""
    samples = len(trainer.datasets.train)
    shuffle = block_shuffle(trainer.job.config.data)
    order = positions_of_rank(0, samples, 0, 1, samples, 0, shuffle=shuffle).samples
    hyper, micro_batches = trainer.prefetcher.prepare(trainer.now.progress)
    learner: Any = trainer.job.learner

    def read(source: Source = trainer.datasets.train) -> None:
        for step in range(steps):
            source.read(order[step * samples_per_step : (step + 1) * samples_per_step])

    def prefetch(prefetcher: Prefetcher) -> None:
        progress = trainer.now.progress
        for _ in range(steps):
            step_hyper, _ = prefetcher.take(progress)
            progress = progress.advance(step_hyper.batch)

    def train() -> None:
        for step in range(steps):
            sums = learner.step(micro_batches, hyper, step)
        float(sums["loss"])  # waits for the device

    stages: dict[str, Callable[[], None]] = {}
    if trainer.datasets.train.reads_any_sample:
        stages["read"] = read
    for name, prefetcher in prefetchers.items():
        stages[name] = functools.partial(prefetch, prefetcher)
    stages["step"] = train
    return stages


def _time_stages(
    stages: Mapping[str, Callable[[], None]],
    prefetchers: Sequence[Prefetcher],
    communicator: Communicator,
    rounds: int,
) -> dict[str, list[float]]:
    """Returns seconds of each stage in each round; a round runs all stages in turn, and one more
    round before them warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in stages}
    for number in range(rounds + 1):
        if communicator.rank == 0 and number > 0:
            print(f"bench data: round {number} of {rounds}", file=sys.stderr, flush=True)
        for name, run in stages.items():
            communicator.allgather_object(None)  # all ranks start together
            began = time.perf_counter()
            run()
            if number > 0:
                seconds[name].append(time.perf_counter() - began)
            for prefetcher in prefetchers:
                prefetcher.drain()
    return seconds


def to_text(result: Mapping[str, Any]) -> list[str]:
    """Formats the report as text."""
    shape = "x".join(map(str, result["shape"]))
    needed = result["samples_per_s"]["step"][1]
    rows = [["", "images/s", "quartiles", "x the step's need"]]
    for name, (low, median, high) in result["samples_per_s"].items():
        rows.append(
            [name, f"{median:,.0f}", f"{low:,.0f} to {high:,.0f}", f"{median / needed:.2f}"]
        )
    return [
        f"{result['samples']:,} samples of {shape}, {plural(result['ranks'], 'rank')} with "
        f"{result['batch_of_a_rank']} a step each, "
        f"{result['prefetch']}; prepared in {result['prepared_s']:.1f} s",
        *align(rows, left=(0, 1)),
        f"of one rank, median and quartiles of {result['rounds']} rounds; prefetching reads, "
        "augments and copies to the device",
    ]
