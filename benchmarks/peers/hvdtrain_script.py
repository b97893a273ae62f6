"""hvdtrain: the loop of `python -m hvdtrain`, with a sync point every ten steps, the health checks and the watchdog.

mpirun -np 2 python benchmarks/peers/hvdtrain_script.py --root DIR [--engine horovod|mpi|torchdist] [key=value ...]
"""  # noqa: E501

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

from data import LR, MOMENTUM, WIDTHS, Clock, network, parser

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from blocks import Trainer

from hvdtrain import __version__
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config.read import configure
from hvdtrain.training.build import connect
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.health.watchdog import Watchdog

LIBRARY = {"horovod": "horovod", "mpi": "mpi4py", "torchdist": "torch"}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--engine", default="horovod", choices=LIBRARY)
    arguments.add_argument(
        "words", nargs="*", metavar="key=value", help="for hvdtrain, as in comm.reduce=bucket"
    )
    options = arguments.parse_args()
    place = placement(os.environ)
    communicator, _ = connect(configure(None, [f"comm.engine={options.engine}"]), place)
    overrides = [
        "data.name=fashion_mnist",
        f"data.root={options.root}",
        f"batch.size={options.batch}",
        f"speed.precision={options.precision}",
        "model.name=wide_resnet",
        f"model.widths={list(WIDTHS)}",
        f"model.dropout={options.dropout}",
        "optim.name=sgd",
        f"optim.base_lr={LR}",
        f"optim.momentum={MOMENTUM}",
        *options.words,
    ]
    with Signals(place.rank) as signals:
        trainer = Trainer(overrides, communicator, signals)
        learner: Any = trainer.job.learner
        # as in the other scripts
        learner.model.load_state_dict(network(options.dropout, plain=False).state_dict())
        health = trainer.job.health

        def block(steps: int) -> float:
            before = trainer.now.sums
            trainer.block(steps)
            after = trainer.now.sums
            return float(after["loss"] - before["loss"]) / float(after["count"] - before["count"])

        clock = Clock(options, communicator.allgather_object)
        with Watchdog(health.heartbeat, signals, health.guard, communicator.rank):
            clock.run(block)
    library = LIBRARY[options.engine]
    clock.print_result(
        communicator.rank,
        " ".join(["hvdtrain", options.engine, *options.words]),
        {"hvdtrain": __version__, library: importlib.metadata.version(library)},
    )
    communicator.close()


if __name__ == "__main__":
    main()
