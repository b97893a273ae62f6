"""Counts on the ranks the tensors of real steps, and what they send: {case: {"counted": ...,
"predicted": ...}}.

A case: "stage recompute passes WORDS", as "2 all 1 speed.precision=bf16", of a small image GPT;
or SAMPLES:MODEL WORDS, as "4:wide_resnet model.widths=[16,160,320,640] shard.stage=1", of images of
32x32 or of 256 tokens
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.counted import Moved, counted
from hvdtrain.config.read import configure
from hvdtrain.config.schema import Config
from hvdtrain.core.lengths import read_length
from hvdtrain.core.progress import Hyper
from hvdtrain.data.field import Field
from hvdtrain.extras.memory_forecast.live_storages import LiveStorages
from hvdtrain.extras.memory_forecast.predict import mark, planned_work
from hvdtrain.frameworks.footprint import Footprint, PlannedStep
from hvdtrain.frameworks.torch.build import footprint
from hvdtrain.tasks.classification import without_statistics
from hvdtrain.tasks.language import Language
from hvdtrain.tasks.task import Task
from hvdtrain.training.build import build_learner

SAMPLES = 8
MPI = frozenset({"several_ranks", "bfloat16_sums", "plain_mpi"})


def predicted(*words: str, ranks: int = 1, samples: int = 8, passes: int = 1) -> Footprint:
    """The footprint of a small mlp on images of 8x8."""
    step = PlannedStep(samples, passes, 4, 0, writes_checkpoints=True)
    return footprint(
        configure(None, ["model.name=mlp", "model.widths=[500,500]", *words]),
        without_statistics((8, 8, 1), 10),
        step,
        ranks,
        MPI,
    )


def measured(
    config: Config,
    task: Task,
    communicator: Communicator,
    moved: list[Moved],
    passes: int,
    samples: int,
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the bytes of each kind at the peak of the second step, with real numbers, and the
    bytes that it sends, by kind. `moved`: records of what was sent.

    With comm.local_from the ranks reduce gradients in two steps, then make two steps by themselves;
    the maximum of all but the first step counts.
    """
    live = LiveStorages()
    largest = dict[str, int]()
    together = (
        [True, True, False, False] if read_length(config.comm.local_from).amount else [False, False]
    )
    with live:
        learner: Any = build_learner(config, task, communicator)
        for p in learner.parameters:
            p.register_post_accumulate_grad_hook(lambda p: live.mark([p.grad], "gradients"))
        zeros = {
            name: np.zeros((samples // passes, *field.shape), field.dtype)
            for name, field in task.fields.items()
        }
        with learner.stopwatch.replaced_by(live):
            for step, reduces in enumerate(together):
                mark(learner, live)
                live.reset_peak()
                moved.clear()
                micro = [
                    learner.to_device({name: array.copy() for name, array in zeros.items()})
                    for _ in range(passes)
                ]
                learner.step(
                    micro,
                    Hyper(1e-3, 0.9, 0.0, samples * learner.data.size, step, together=reduces),
                    step,
                )
                sent = by_kind(moved)
                if step == len(together) - 1:
                    learner.sync_buffers(communicator)
                if step and live.peak_bytes > sum(largest.values()):
                    largest = dict(live.peak)
    return largest, sent


def by_kind(moved: Iterable[Moved]) -> dict[str, int]:
    found = Counter[str]()
    for each in moved:
        found[each.kind] += each.sent_bytes
    return dict(found)


def by_case(communicator: Communicator, cases: list[str]) -> dict[str, Any]:
    """Returns the memory and sent bytes of each case, and the planned values."""
    found = {}
    moved = list[Moved]()
    # once: torch keeps the first one that it makes process groups of
    communicator = counted(communicator, moved)
    for case in cases:
        if ":" in case:
            words = case.partition(":")[2].split()
            task = without_statistics((32, 32, 3), 10)
            passes = 1
            samples = int(case.partition(":")[0])
            words[0] = f"model.name={words[0]}"
            if words[0] == "model.name=gpt":
                words, task = [*words, "task.name=language"], Language(Field("int64", (257,), 512))
        else:
            stage = case.split()[0]
            recompute = case.split()[1]
            passes = int(case.split()[2])
            samples = SAMPLES
            task = Language(Field("int64", (65,), 64))
            words = [
                "model.name=gpt",
                "model.layers=3",
                "model.width=64",
                f"shard.stage={stage}",
                f"model.recompute={recompute}",
            ]
            words += [
                *case.split()[3:],
                "task.name=language",
                "optim.name=adamw",
                "optim.clip_norm=1",
                "comm.bucket_mb=0.2",
            ]
        config = configure(None, words)
        if config.parallel.has_stages:
            passes = 2 * config.parallel.pipe_ranks
        real, sent = measured(config, task, communicator, moved, passes, samples)
        step = PlannedStep(samples, passes, 1, 0, writes_checkpoints=False)
        works = planned_work(config, task, step, communicator.size, communicator.features)
        planned = max((work.footprint for work in works), key=lambda footprint: footprint.total)
        ranks = communicator.allgather_object((sum(real.values()), sent))
        found[case] = {
            "counted": real,
            "sum": max(size for size, _ in ranks),
            "predicted": planned.named(),
            "step": planned.step,
        }
        # by the first rank of each stage
        found[case]["sent"] = [sent for _, sent in ranks][: len(works)]
        found[case]["planned to send"] = [by_kind(work.moved) for work in works]
    return found
