"""bench step: images/s of training, where a step's time goes, and how much of what the processor can do it is.

With several ranks the same step is also timed on each rank alone, all at once: what the ranks' meeting adds is the exposed communication.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from hvdtrain.cli.bench import tables
from hvdtrain.cli.bench.on_ranks import Parser, on_ranks, rounds_of
from hvdtrain.cli.bench.tables import quartiles
from hvdtrain.cli.bench.trainer import Trainer
from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.config import plugins
from hvdtrain.config.read import Provenance, configure
from hvdtrain.config.schema import Config
from hvdtrain.config.schema_run import CommConfig
from hvdtrain.frameworks.stopwatch import total
from hvdtrain.train.health.signals import Signals


def bench_step(words: Sequence[str]) -> int:
    """The command behind `bench step`; returns the exit code. Every rank calls it, rank 0 speaks."""
    asked, rest = _parse(words)
    config, provenance = configure(asked.config, [*rest, f"log.every_steps={asked.steps}"])

    def work(communicator: Communicator, why: str) -> None:
        with Signals(communicator.rank) as signals:
            tree = measure(config, provenance, communicator, signals, (asked.rounds, asked.steps))
        if communicator.rank == 0:
            tables.tell(asked.json, text(tree | {"why": why}), tree)

    return on_ranks((config, provenance), work)


class Alone(SingleProcessCommunicator):
    """One rank's own engine, on the cores and the device that it has beside the others."""

    def __init__(self, communicator: Communicator) -> None:
        self.local_rank, self.local_size = communicator.local_rank, communicator.local_size
        self.allgather_object = communicator.allgather_object  # type: ignore[method-assign]  # for fair_threads(): all ranks build theirs together


def measure(config: Config, provenance: Provenance, communicator: Communicator, signals: Signals, turns: tuple[int, int]) -> dict[str, Any]:
    """Every rank calls it; what it tells is rank 0's."""
    rounds, steps = turns
    together = Trainer(config, provenance, communicator, signals)
    ones = {"together": together}
    if communicator.size > 1:
        ones["alone"] = Trainer(*_of_one_rank(config, provenance, communicator), Alone(communicator), signals, together.data)
    times: dict[str, list[float]] = {name: [] for name in ones}
    for turn in range(rounds + 1):  # the first round warms up
        if communicator.rank == 0 and turn:
            print(f"bench step: round {turn} of {rounds}", file=sys.stderr, flush=True)
        for name in list(ones)[:: 1 if turn % 2 else -1]:
            communicator.allgather_object(None)
            times[name].append(ones[name].block(steps) / steps)
        if not turn:
            together.prefetcher.waited_s = 0.0
    seconds = times["together"][1:]
    low, middle, high = quartiles(seconds)
    batch = together.job.recipe.at(together.now.progress).batch
    tree: dict[str, Any] = {
        "images_per_s": batch / middle,
        "images_per_s_quartiles": [batch / high, batch / low],
        "ms_per_step": 1e3 * middle,
        "rounds": rounds,
        "steps_per_round": steps,
        "batch": batch,
        "ranks": communicator.size,
        "engine": communicator.name,
        "model": together.job.learner.describe(),
        "feed": together.prefetcher.summary,
        "data_wait_ms": 1e3 * together.prefetcher.waited_s / (rounds * steps),
    }
    if communicator.size > 1:
        apart = [a - b for a, b in zip(seconds, times["alone"][1:], strict=True)]
        tree |= {
            "alone_ms_per_step": 1e3 * statistics.median(times["alone"][1:]),
            "exposed_communication_ms": 1e3 * statistics.median(apart),
        }
    return tree | _figures(config, together, steps, middle)


def _of_one_rank(config: Config, provenance: Provenance, communicator: Communicator) -> tuple[Config, Provenance]:
    """The same step of this rank without the others: its share of the batch, nothing about meeting."""
    share = -(-config.batch.size // communicator.size) if config.batch.per_rank is None else config.batch.per_rank
    changed = dataclasses.replace(
        config,
        batch=dataclasses.replace(config.batch, size=share, per_rank=None),
        comm=CommConfig(engine="single"),
        norm=config.norm if config.norm.kind != "sync" else dataclasses.replace(config.norm, kind="batch"),
        log=dataclasses.replace(config.log, noise_scale=False),
    )
    return changed, provenance


def _figures(config: Config, trainer: Trainer, steps: int, step_s: float) -> dict[str, Any]:
    """Seconds by phase and operations, where the framework tells them."""
    framework = plugins.load("frameworks", config.framework, "framework")
    if not hasattr(framework, "figures"):
        return {}
    learner: Any = trainer.job.learner
    figures, prefetcher = framework.figures(), trainer.prefetcher
    watch, p = figures.patient(learner.device), trainer.now.progress
    learner.stopwatch = watch
    for _ in range(steps):
        watch.enter("data")
        hyper, micro = prefetcher.take(p)
        learner.step(micro, hyper, p.step)
        p = p.advance(hyper.batch)
    phases = total(watch.read())
    hyper, micro = prefetcher.take(p)
    flops, peak = figures.step_flops(learner, micro, hyper), figures.peak_flops(learner)
    return {
        "phases_ms": {phase: 1e3 * seconds / steps for phase, seconds in phases.items()},
        "gflop_per_step_of_a_rank": flops / 1e9,
        "gflop_per_s_of_a_rank": flops / step_s / 1e9,
        "matmul_gflop_per_s": peak / 1e9,
        "share_of_matmul": flops / step_s / peak,
    }


def text(tree: dict[str, Any]) -> list[str]:
    """For people."""
    low, high = tree["images_per_s_quartiles"]
    turns = f"{tree['rounds']} rounds of {tree['steps_per_round']} steps"
    ranks = f"{tree['ranks']} rank{'s' * (tree['ranks'] > 1)}, engine {tree['engine']}"
    lines = [
        f"{tree['images_per_s']:.1f} images/s (quartiles {low:.1f} to {high:.1f}, {turns})",
        f"  {tree['ms_per_step']:.2f} ms a step of {tree['batch']} images on {ranks}",
        f"  model {tree['model']}",
        f"  samples {tree['feed']}: {tree['data_wait_ms']:.2f} ms of waiting a step",
    ]
    if "exposed_communication_ms" in tree:
        words = f"{tree['exposed_communication_ms']:.2f} ms a step; each rank alone, all at once: {tree['alone_ms_per_step']:.2f} ms"
        lines.append(f"  exposed communication {words}")
    if "phases_ms" in tree:
        total = sum(tree["phases_ms"].values())
        lines += ["  phases, one after the other:"]
        lines += [f"    {phase:24} {ms:8.2f} ms {ms / total:6.1%}" for phase, ms in tree["phases_ms"].items()]
        did = f"{tree['gflop_per_step_of_a_rank']:.1f} GFLOP a step of a rank: {tree['gflop_per_s_of_a_rank']:.0f} GFLOP/s"
        lines.append(f"  {did}, {tree['share_of_matmul']:.1%} of a matrix product's {tree['matmul_gflop_per_s']:.0f}")
    return lines


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser("step")
    parser.add_argument("--rounds", type=rounds_of, default=7)
    parser.add_argument("--steps", type=rounds_of, default=20)
    return parser.parse_known_args(words)
