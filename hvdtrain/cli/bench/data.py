"""bench data: how fast samples come, alone, against how fast the step uses them. Every rank reads its own; rank 0 tells of itself."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.cli.bench import tables
from hvdtrain.cli.bench.on_ranks import Parser, on_ranks, rounds_of
from hvdtrain.cli.bench.tables import quartiles
from hvdtrain.cli.bench.trainer import Trainer
from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.read import Provenance, configure
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Batch
from hvdtrain.core.progress import Hyper
from hvdtrain.train.health.signals import Signals
from hvdtrain.train.input.prefetch import Prefetcher
from hvdtrain.train.job import prepare

MOST_STEPS = 20  # of one block


def bench_data(words: Sequence[str]) -> int:
    """The command behind `bench data`; returns the exit code. Every rank calls it, rank 0 speaks."""
    asked, rest = _parse(words)
    config, provenance = configure(asked.config, rest)

    def work(communicator: Communicator, why: str) -> None:
        with Signals(communicator.rank) as signals:
            tree = measure(config, provenance, communicator, signals, asked.rounds)
        if communicator.rank == 0:
            tables.tell(asked.json, text(tree), tree)

    return on_ranks((config, provenance), work)


def measure(config: Config, provenance: Provenance, communicator: Communicator, signals: Signals, rounds: int) -> dict[str, Any]:
    """Every rank calls it. All ways in turn in each round, the first of which warms up."""
    began = time.perf_counter()
    parts = prepare(config, provenance)
    tree: dict[str, Any] = {"prepared_s": time.perf_counter() - began, "samples": len(parts.train), "shape": list(parts.train.shape)}
    trainer = Trainer(config, provenance, communicator, signals, parts)
    batch = trainer.job.recipe.at(trainer.now.progress).batch
    share = max(1, batch // communicator.size)
    steps = max(1, min(MOST_STEPS, len(parts.train) // share))
    feeds = {"feed": trainer.prefetcher}
    others = {f"feed, {n} reader{'s' * (n > 1)}": n for n in (1, 2) if n != trainer.prefetcher.readers or not trainer.prefetcher.ahead}
    for name, readers in others.items() if not trainer.prefetcher.cached_on_device else ():
        data = dataclasses.replace(config.data, readers=readers, ahead=2 * readers, resident=False)
        changed = dataclasses.replace(config, data=data, batch=trainer.job.config.batch)
        feeds[name] = Prefetcher(changed, communicator, trainer.job.recipe, parts.train, trainer.job.learner)
    ways: dict[str, Callable[[], object]] = {"read": lambda: _read(parts.train, share, steps)}
    ways |= {name: lambda prefetcher=prefetcher: _take(prefetcher, trainer, steps) for name, prefetcher in feeds.items()}  # type: ignore[misc]
    ready = trainer.prefetcher.prepare(trainer.now.progress)
    ways["step"] = lambda: _train(trainer.job.learner, ready, steps)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        if communicator.rank == 0 and turn:
            print(f"bench data: round {turn} of {rounds}", file=sys.stderr, flush=True)
        for name, act in ways.items():
            communicator.allgather_object(None)
            start = time.perf_counter()
            act()
            seconds[name].append((time.perf_counter() - start) / (steps * share))
            for prefetcher in feeds.values():
                prefetcher.drain()
    for prefetcher in feeds.values():
        prefetcher.close()
    rows = {name: [1 / s for s in reversed(quartiles(found[1:]))] for name, found in seconds.items()}
    return tree | {
        "images_per_s": rows,
        "rounds": rounds,
        "batch_of_a_rank": share,
        "ranks": communicator.size,
        "feed": trainer.prefetcher.summary,
    }


def _read(source: Any, share: int, steps: int) -> None:
    """Random rows, as a shuffle gives them."""
    order = np.random.default_rng(0).permutation(len(source))
    for step in range(steps):
        source.read(order[step * share : (step + 1) * share])


def _take(prefetcher: Prefetcher, trainer: Trainer, steps: int) -> None:
    """Samples as they come to the step: read, drawn for, on the device."""
    p = trainer.now.progress
    for _ in range(steps):
        hyper, _ = prefetcher.take(p)
        p = p.advance(hyper.batch)


def _train(learner: Any, ready: tuple[Hyper, list[Batch]], steps: int) -> None:
    """The step on samples that are there already."""
    for step in range(steps):
        sums = learner.step(ready[1], ready[0], step)
    float(sums["loss"])  # waits for the device


def text(tree: dict[str, Any]) -> list[str]:
    """For people."""
    need = tree["images_per_s"]["step"][1]
    where = f"{tree['samples']:,} samples of {'x'.join(map(str, tree['shape']))}"
    lines = [
        f"{where}, {tree['batch_of_a_rank']} a step on each of {tree['ranks']}, {tree['feed']}; prepared in {tree['prepared_s']:.1f} s"
    ]
    table = [["", "images/s", "quartiles", "x the step's need"]]
    for name, (low, middle, high) in tree["images_per_s"].items():
        table.append([name, f"{middle:,.0f}", f"{low:,.0f} to {high:,.0f}", f"{middle / need:.2f}"])
    return [
        *lines,
        *tables.aligned(table),
        f"of one rank, median and quartiles of {tree['rounds']} rounds; a feed reads, draws and brings to the device",
    ]


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser("data")
    parser.add_argument("--rounds", type=rounds_of, default=5)
    return parser.parse_known_args(words)
