"""Checks that the model gives the same outputs on all ranks, by its loss for a fixed batch before
the first step and at the first sync point.

It detects differences that digests of weights do not show, such as a forward pass that depends on a
file, a library or the rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.batch import BatchConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.progress import fold
from hvdtrain.data.field import Field
from hvdtrain.errors import Diverged
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks.task import Task
from hvdtrain.training.replicas.compare import describe_minority

# The relative difference of losses that counts as rounding: ranks may have different GPUs, cores or
# numbers of threads. TensorFloat-32, if only one GPU has it, causes 1e-3; bfloat16 keeps 8 bits.
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-3}
_TOLERANCE_16 = 2e-2
# most samples; fewer if a pass of the job has fewer, so that the probe does not need more memory
# than training
_SAMPLES = 8
_VALUES = 2**24  # most values of a field
_FIX = (
    "give every rank the same model: its code and the files, variables and libraries that its "
    "forward uses must not differ"
)


class Probe:
    """Compares the losses of a fixed batch over ranks. It does nothing with speed.compile, because
    compiling for the batch's shape could change the kernels of training."""

    def __init__(self, config: Config, task: Task) -> None:
        self._task = task
        self._tolerance = TOLERANCE.get(config.speed.precision, _TOLERANCE_16)
        parallel = config.parallel
        # of one model or one sample, so not every rank counts outputs
        has_parts = parallel.ranks > 1 or parallel.ranks_of_sample > 1
        self._off = config.speed.compile != "none" or not config.guard.equal_steps or has_parts
        self._batch = config.batch

    def compare(
        self, communicator: Communicator, learner: Learner, hosts: Sequence[str], when: str
    ) -> None:
        """Compares the losses of all ranks. A collective. Raises the same Diverged on all ranks if
        losses differ by more than rounding.

        The model is called twice in evaluation mode; a loss that is random there is not compared.
        """
        if self._off or communicator.size == 1:
            return
        batch = probe_batch(self._task, largest_pass(self._batch, communicator.size))
        own = np.array([[_loss(learner, batch), _loss(learner, batch)]])
        of_all = communicator.allgather(own, "probe")  # (ranks, 2)
        if not np.array_equal(of_all[:, 0], of_all[:, 1], equal_nan=True):
            return
        groups = group_close(of_all[:, 0].tolist(), self._tolerance)
        if len(set(groups)) > 1:
            minority = describe_minority(groups, hosts)
            usual, other = (of_all[ranks[0], 0] for ranks in (minority.majority, minority.ranks))
            what = (
                f"the model gives other outputs on some ranks {when}: its loss for a fixed batch "
                f"is {usual:.9g} on "
            )
            what += f"rank {minority.majority[0]}, {other:.9g} on rank {minority.ranks[0]}"
            raise Diverged(what, minority.where, _FIX)


def largest_pass(batch: BatchConfig, ranks: int) -> int:
    """Returns the largest number of samples in a forward pass of a rank."""
    micro = batch.micro if isinstance(batch.micro, int) else batch.size
    return min(batch.evaluate, micro, -(-batch.size // ranks))


def _loss(learner: Learner, batch: Batch) -> float:
    return float(learner.evaluate(learner.to_device(batch))["loss"])


def probe_batch(task: Task, most: int = _SAMPLES) -> Batch:
    """Creates a batch of counter-based random numbers. Labels are 0, so that the loss shows each
    image's logits and not only their mean.

    A task with user functions, which may only accept real data, gets samples of the data.
    """
    if task.examples is not None:
        return dict(task.examples)
    largest = max(math.prod(field.shape) for field in task.fields.values())
    samples = max(1, min(_SAMPLES, most, _VALUES // largest))
    return {name: _probe_field(field, samples) for name, field in task.fields.items()}


def _probe_field(field: Field, samples: int) -> np.ndarray:
    """Returns (samples, *shape): random bytes, integers in the field's range (0 for one number per
    sample), or floats from -1 to 1."""
    values = samples * math.prod(field.shape)
    dtype = np.dtype(field.dtype)
    if field.is_mask:
        return np.ones((samples, *field.shape), dtype)
    if dtype == np.uint8 and not field.values:
        words = fold(np.arange(-(-values // 8), dtype=np.uint64)).astype("<u8")
        return words.view(np.uint8)[:values].reshape(samples, *field.shape)
    words = fold(np.arange(values, dtype=np.uint64)).reshape(samples, *field.shape)
    if dtype.kind == "f":
        return ((words >> np.uint64(40)).astype(np.float64) / 2**23 - 1.0).astype(dtype)
    return (words % np.uint64(field.values or 2) * np.uint64(bool(field.shape))).astype(dtype)


def group_close(losses: Sequence[float], tolerance: float) -> list[int]:
    """Returns for each rank 0 if its loss is the most frequent one, else a number shared by equal
    losses. NaN equals NaN."""
    values = np.array(losses)
    distinct, which, counts = np.unique(
        np.where(np.isfinite(values), values, np.inf), return_inverse=True, return_counts=True
    )

    def close_to(
        loss: float,
        # for each distinct loss, never for pairs of ranks, which are 67 million on 8,192 ranks
    ) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return np.where(
                np.isfinite(distinct) & np.isfinite(loss),
                np.abs(loss - distinct) <= tolerance * np.abs(distinct),
                loss == distinct,
            )

    near = np.array([counts[close_to(loss)].sum() for loss in distinct])
    usual = close_to(distinct[which[near[which].argmax()]])  # in a tie, the first
    return np.where(usual, 0, np.arange(1, len(distinct) + 1))[which].tolist()
