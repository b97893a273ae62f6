"""bench step: images/s of training, where the time of a step goes, and how much of the processor's
peak it reaches.

With several ranks, the step is also timed without communication, on all ranks at the same time. The
difference is the exposed communication.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.cli.output import plural, print_result
from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.comm import CommConfig
from hvdtrain.config.sections.parallel import ParallelConfig
from hvdtrain.extras.bench.options import BenchParser, two_or_more
from hvdtrain.extras.bench.trainer import Trainer, quartiles, run_on_ranks
from hvdtrain.features.every_feature import configure
from hvdtrain.frameworks.stopwatch import total
from hvdtrain.training.health.signals import Signals


def bench_step(arguments: Sequence[str]) -> int:
    """Runs `bench step`; returns the exit code. Every rank calls it, rank 0 prints. Raises
    UserError."""
    parser = BenchParser("step")
    parser.add_argument("--rounds", type=two_or_more, default=7)
    parser.add_argument("--steps", type=two_or_more, default=20)
    options, overrides = parser.parse_known_args(arguments)
    config = configure(options.config, [*overrides, f"log.every_steps={options.steps}"])

    def work(communicator: Communicator, engine_reason: str) -> None:
        with Signals(communicator.rank) as signals:
            result = measure(config, communicator, signals, options.rounds, options.steps)
        if communicator.rank == 0:
            print_result(options.json, to_text(result), result)

    return run_on_ranks(config, work)


class OneRank(SingleProcessCommunicator):
    """A communicator of one rank, which keeps the cores and the device that it has among the ranks
    of its host."""

    def __init__(self, communicator: Communicator) -> None:
        self.local_rank = communicator.local_rank
        self.local_size = communicator.local_size
        self._all_ranks = communicator

    def allgather_object(self, thing: Any) -> list[Any]:
        """Gathers over all ranks, because fair_threads() shares a host's cores, and all ranks build
        their learners at the same time."""
        return self._all_ranks.allgather_object(thing)


def measure(
    config: Config, communicator: Communicator, signals: Signals, rounds: int, steps: int
) -> dict[str, Any]:
    """Returns the result, as --json prints it; rank 0's counts. A collective: every rank calls
    it."""
    trainer = Trainer(config, communicator, signals)
    trainers = {"together": trainer}
    if communicator.size > 1:
        own_share = _config_of_one_rank(config, trainer.job.learner.data.size)
        trainers["alone"] = Trainer(own_share, OneRank(communicator), signals, trainer.datasets)
    seconds = _time_blocks(trainers, communicator, rounds, steps)
    low, step_s, high = quartiles(seconds["together"])
    batch = trainer.job.recipe.at(trainer.now.progress).batch
    result: dict[str, Any] = {
        "samples_per_s": batch / step_s,
        "samples_per_s_quartiles": [batch / high, batch / low],
        "ms_per_step": 1e3 * step_s,
        "rounds": rounds,
        "steps_per_round": steps,
        "batch": batch,
        "ranks": communicator.size,
        "engine": communicator.name,
        "model": trainer.job.learner.describe(),
        "prefetch": trainer.prefetcher.summary,
        "data_wait_ms": 1e3 * trainer.prefetcher.waited_s / (rounds * steps),
    }
    if "alone" in trainers:
        exposed_s = [
            together - alone
            for together, alone in zip(seconds["together"], seconds["alone"], strict=True)
        ]
        result["alone_ms_per_step"] = 1e3 * statistics.median(seconds["alone"])
        result["exposed_communication_ms"] = 1e3 * statistics.median(exposed_s)
    return result | _phases_and_operations(config, trainer, steps, step_s)


def _time_blocks(
    trainers: Mapping[str, Trainer], communicator: Communicator, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Returns seconds of a step in each round, by trainer; every second round runs them in reverse
    order."""
    names = list(trainers)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        is_warm_up = number == 0
        if communicator.rank == 0 and not is_warm_up:
            print(f"bench step: round {number} of {rounds}", file=sys.stderr, flush=True)
        for name in names if number % 2 else reversed(names):
            communicator.allgather_object(None)  # all ranks start together
            block_s = trainers[name].block(steps)
            if not is_warm_up:
                seconds[name].append(block_s / steps)
        if is_warm_up:
            trainers["together"].prefetcher.waited_s = 0.0
    return seconds


def _config_of_one_rank(config: Config, size: int) -> Config:
    """Returns a configuration for a single rank: its share of the batch, and no settings that need
    several ranks."""
    share = (
        -(-config.batch.size // size) if config.batch.per_rank is None else config.batch.per_rank
    )
    norm_kind = "batch" if config.norm.kind == "sync" else config.norm.kind
    return config.replace(
        batch=config.batch.replace(size=share, per_rank=None),
        comm=CommConfig(engine="single"),
        parallel=ParallelConfig(),
        norm=config.norm.replace(kind=norm_kind),
        log=config.log.replace(noise_scale=False),
    )


def _phases_and_operations(
    config: Config, trainer: Trainer, steps: int, step_s: float
) -> dict[str, Any]:
    """Milliseconds by phase, and floating-point operations; nothing if the framework does not
    count them."""
    if config.framework != "torch":
        return {}
    from hvdtrain.extras.bench import of_torch

    learner: Any = trainer.job.learner
    progress = trainer.now.progress
    stopwatch = of_torch.synchronizing_stopwatch(learner.device)
    with learner.stopwatch.replaced_by(stopwatch):
        for _ in range(steps):
            stopwatch.enter("data")
            hyper, micro_batches = trainer.prefetcher.take(progress)
            learner.step(micro_batches, hyper, progress.step)
            progress = progress.advance(hyper.batch)
    phases = total(stopwatch.read())
    hyper, micro_batches = trainer.prefetcher.take(progress)
    flops = of_torch.step_flops(learner, micro_batches, hyper)
    peak_flops = of_torch.peak_flops(learner)
    return {
        "phases_ms": {phase: 1e3 * seconds / steps for phase, seconds in phases.items()},
        "gflop_per_step_of_a_rank": flops / 1e9,
        "gflop_per_s_of_a_rank": flops / step_s / 1e9,
        "matmul_gflop_per_s": peak_flops / 1e9,
        "share_of_matmul": flops / step_s / peak_flops,
    }


def to_text(result: Mapping[str, Any]) -> list[str]:
    """Formats the report as text."""
    low, high = result["samples_per_s_quartiles"]
    rounds = f"{result['rounds']} rounds of {result['steps_per_round']} steps"
    ranks = f"{plural(result['ranks'], 'rank')}, engine {result['engine']}"
    lines = [
        f"{result['samples_per_s']:.1f} images/s (quartiles {low:.1f} to {high:.1f}, {rounds})",
        f"  {result['ms_per_step']:.2f} ms a step of {result['batch']} images on {ranks}",
        f"  model {result['model']}",
        f"  samples {result['prefetch']}: {result['data_wait_ms']:.2f} ms of waiting a step",
    ]
    if "exposed_communication_ms" in result:
        alone = f"a step of each rank alone, all at once: {result['alone_ms_per_step']:.2f} ms"
        lines.append(
            f"  exposed communication {result['exposed_communication_ms']:.2f} ms a step; {alone}"
        )
    if "phases_ms" in result:
        lines += ["  phases, one after the other:"]
        all_ms = sum(result["phases_ms"].values())
        lines += [
            f"    {phase:24} {ms:8.2f} ms {ms / all_ms:6.1%}"
            for phase, ms in result["phases_ms"].items()
        ]
        lines.append(
            f"  {result['gflop_per_step_of_a_rank']:.1f} GFLOP a step of a rank: "
            f"{result['gflop_per_s_of_a_rank']:.0f} GFLOP/s, "
            f"{result['share_of_matmul']:.1%} of the {result['matmul_gflop_per_s']:.0f} of a "
            "matrix product"
        )
    return lines
