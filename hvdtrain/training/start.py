"""The state that all ranks begin with: a new one, or that of the newest checkpoint; and the run folder."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.rank_0 import on_rank_0
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays
from hvdtrain.frameworks.learner import Learner
from hvdtrain.recipe import from_config
from hvdtrain.training.checkpoint.resume import ResumePoint, find_resume_point
from hvdtrain.training.datasets import Datasets, identity
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.replicas.broadcast import broadcast_state
from hvdtrain.training.run_folder import make_run_folder, write_config


class Start(NamedTuple):
    """What a job begins with, the same on all ranks."""

    run: Path  # as rank 0 knows it
    train_state: TrainState
    notes: list[str]  # lines for the user
    digest: str  # of the state that all ranks have
    weights: int  # numbers that are trained
    checkpoint_limit_bytes: int  # that a file of a checkpoint of this job can have


def start_or_resume(config: Config, datasets: Datasets, communicator: Communicator, learner: Learner) -> Start:
    """Makes the run folder, and gives all ranks the same state. Every rank calls it.

    Raises UserError on all ranks where no checkpoint is good or fits, or the run folder cannot be written.
    """
    sizes = [(name, array.size, array.nbytes) for name, array in learner.views()]
    limit_bytes = 2**20 + 8 * sum(nbytes for _, _, nbytes in sizes)  # a user's optimizer may not have made its state yet
    weights = sum(size for name, size, _ in sizes if name.startswith("p."))
    total = len(datasets.train) * from_config.total_epochs(config)
    restored: Arrays | None = None

    def find() -> tuple[ResumePoint, Path]:
        nonlocal restored
        point, restored = find_resume_point(config, identity(config, datasets), total, limit_bytes)
        return point, make_run_folder(config, point.resumed)

    point, run = on_rank_0(communicator, find)
    digest = broadcast_state(communicator, learner, restored)
    # not before: where the state does not fit the model, the run folder stays as it was
    note = on_rank_0(communicator, lambda: write_config(config, run, resumed=point.train_state.progress.step > 0))
    return Start(run, point.train_state, [*point.notes, note] if note else point.notes, digest, weights, limit_bytes)
