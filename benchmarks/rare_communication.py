"""What ranks that communicate rarely, or with fewer bytes, send and learn: bytes and accuracy on Fashion-MNIST.

mpirun -np 4 python benchmarks/rare_communication.py [--seeds 1,2] [--epochs 2] [--ways NAME;...] [--json FILE] [key=value ...]

Each way trains the same small convolutional network with the same recipe, on a fifth of the images. The bytes are those that a rank sends while it trains, counted in
the communicator; of an allreduce those of a ring, 2 (ranks - 1) / ranks of the buffer. Ranks evaluate once, at the end.
data.root=DIR has the files of Fashion-MNIST.
"""  # noqa: E501

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import append

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.counted import Moved, counted
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config.read import configure
from hvdtrain.events.log import Log
from hvdtrain.training.build import build_learner, connect
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.job import make_job
from hvdtrain.training.loop import evaluate_and_record, train_to_sync_point
from hvdtrain.training.replicas.broadcast import broadcast_state
from hvdtrain.training.start import begin

LOCAL_STEPS = 10
COMMON = (
    "data.name=fashion_mnist data.share=0.2 model.name=convnet model.widths=[8,16,32] "
    "batch.size=128 optim.base_lr=0.1 recipe.warmup=0.5 recipe.schedule=cosine log.every_steps=1000"
)
LOCAL = f"comm.local_steps={LOCAL_STEPS}"
OUTER = f"{LOCAL} comm.outer_lr=0.7 comm.outer_momentum=0.5"
WAYS = {
    "every step": "",
    "every step, fp16": "comm.compression=fp16",
    "PowerSGD, rank 4": "comm.compression_rank=4",
    "PowerSGD, rank 1": "comm.compression_rank=1",
    f"{LOCAL_STEPS} local steps": LOCAL,
    "DiLoCo": OUTER,
    "DiLoCo, 4 fragments": f"{OUTER} comm.fragments=4",
    "DiLoCo, int16": f"{OUTER} comm.differences=int16",
    "gossip after 2 steps, all after 50": "comm.gossip_steps=2 comm.local_steps=50",
}


def train(words: str, communicator: Communicator) -> dict[str, Any]:
    """Returns the accuracy at the end of a job, the bytes that a rank sent, and the seconds."""
    moved: list[Moved] = []
    ranks = counted(communicator, moved)
    config = configure(None, f"{COMMON} {words}".split())
    datasets = open_datasets(config, ranks)
    learner = build_learner(config, datasets.task, ranks)
    broadcast_state(ranks, learner, None)
    now = begin(config, datasets)
    job = make_job(
        config,
        datasets,
        ranks,
        learner,
        signals=Signals(0),
        heartbeat=Heartbeat(),
        log=Log([]),
        start=now,
        run=None,
    )
    moved.clear()
    began = time.perf_counter()
    while not now.progress.done:
        now = train_to_sync_point(job, now)
    seconds = time.perf_counter() - began
    sent = communicator.allreduce(np.array([float(sum(one.sent_bytes for one in moved))]), "sent")
    now = evaluate_and_record(job, now)
    return {
        "accuracy": round(100 * float(now.last), 3),
        "steps": now.progress.step,
        "megabytes": round(float(sent[0]) / communicator.size / 1e6, 3),
        "parameters": sum(p.numel() for p in learner.module.parameters()),
        "learner": learner.describe(),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    communicator, _ = connect(configure(None, ["comm.engine=mpi"]), placement(os.environ))
    for seed in map(int, options.seeds.split(",")):
        for name in options.ways.split(";") if options.ways else WAYS:
            words = (
                f"{WAYS[name]} epochs={options.epochs} seed={seed} {' '.join(options.overrides)}"
            )
            row = {"way": name, "words": WAYS[name], "seed": seed, "epochs": options.epochs}
            row |= {"ranks": communicator.size, **train(words, communicator)}
            if communicator.rank == 0:
                print(
                    {key: row[key] for key in ("way", "seed", "accuracy", "megabytes", "seconds")}
                )
                if options.json:
                    append(Path(options.json), row)
    communicator.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--ways", default="", help="some of: " + ";".join(WAYS))
    parser.add_argument("--json", metavar="FILE", help="append the rows to this file as JSON lines")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every job")
    return parser.parse_args()


if __name__ == "__main__":
    main()
