"""What copies of the training state take in host memory: from a GPU one array at a time, and of it
what the rank needs.

Without a GPU the arrays of a CPU are copied as if they were a GPU's; with `-m gpu` they are.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from rank_threads import ThreadRank, in_threads

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import combine, digest
from hvdtrain.extras.elastic.memory_copy import MemoryCopy
from hvdtrain.frameworks.torch.state import StagingBuffer
from hvdtrain.tasks.classification import without_statistics
from hvdtrain.training.build import build_learner
from hvdtrain.training.checkpoint import files
from hvdtrain.training.checkpoint.shards import CheckpointShard
from hvdtrain.training.progress.train_state import Progress, TrainState
from hvdtrain.training.replicas.broadcast import broadcast_state
from hvdtrain.training.replicas.compare import digest_tables

T = TypeVar("T")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]
LAYERS = 12
WIDTH = 256
# bytes; Adam has twice as many
WEIGHTS = 4 * ((64 + 1) * WIDTH + (LAYERS - 1) * (WIDTH + 1) * WIDTH + (WIDTH + 1) * 10)
LARGEST = 4 * WIDTH * WIDTH


class Counted(StagingBuffer):
    """Counts what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[int] = []  # bytes

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self.copied.append(tensor.nbytes)
        return super().copy(tensor)


class AsOfAGpu(Counted):
    """Copies what lies in host memory, too."""

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return False


def learner_on(device: str, communicator: Communicator, *words: str) -> Any:
    """With other numbers in each array."""
    job = [
        "model.name=mlp",
        f"model.widths={[WIDTH] * LAYERS}",
        "optim.name=adam",
        "speed.precision=fp32",
        f"speed.device={device}",
    ]
    learner: Any = build_learner(
        configure(None, [*job, *words]), without_statistics((8, 8, 1), 10), communicator
    )
    learner._state._staging = Counted() if device == "cuda" else AsOfAGpu()
    for number, tensor in enumerate(learner._state.tensors().values()):
        numbers = (
            torch.arange(tensor.numel(), dtype=torch.float32) + number + 1000 * communicator.rank
        )
        tensor.detach().copy_(numbers.view(tensor.shape))
    return learner


def most_bytes(work: Callable[[], T]) -> tuple[T, int]:
    """What `work` returns, and the most that arrays of numpy took meanwhile: the buffer is
    torch's."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        result = work()
        return result, tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("device", DEVICES)
def test_digests_take_one_buffer(device: str) -> None:
    learner = learner_on(device, SingleProcessCommunicator())
    tables, most = most_bytes(lambda: digest_tables(learner.pieces()))
    assert most < LARGEST and learner._state._staging._buffer.nbytes == LARGEST
    assert sum(learner._state._staging.copied) == 3 * WEIGHTS
    learner._state._staging = StagingBuffer()
    assert combine(tables.whole) == digest(learner.state())


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_copies_what_it_writes_of_a_checkpoint(device: str) -> None:
    """With ZeRO 1 rank 0 writes the weights, and each its half of two numbers for each of them."""
    learners = in_threads(2, lambda communicator: learner_on(device, communicator, "shard.stage=1"))
    for rank, learner in enumerate(learners):
        parts, most = most_bytes(
            lambda: CheckpointShard(list(learner.pieces()), files.ARRAYS, files.file_of, rank)  # noqa: B023
        )
        own = sum(piece.read().nbytes for piece in parts._own)
        assert own == pytest.approx(WEIGHTS * (2 if rank == 0 else 1), rel=1e-3)
        assert sum(learner._state._staging.copied) == own and most < own + LARGEST
        learner._state._staging = StagingBuffer()
        plain = {
            piece.name: piece.read() for piece in (piece.copied() for piece in learner.pieces())
        }
        assert all(np.array_equal(piece.read(), plain[piece.name]) for piece in parts._own)


@pytest.mark.parametrize("device", DEVICES)
def test_a_whole_state_is_copied_once(device: str) -> None:
    learner = learner_on(device, SingleProcessCommunicator())
    state, most = most_bytes(learner.state)
    assert 3 * WEIGHTS <= most < 3 * WEIGHTS + LARGEST
    assert digest(state) == combine(digest_tables(learner.pieces()).whole)
    copied = len(learner._state._staging.copied)
    shapes = {piece.name: piece.shape for piece in learner.pieces()}
    assert shapes == {name: array.shape for name, array in state.items()}
    learner.load(state)
    assert len(learner._state._staging.copied) == copied, "names and shapes need no numbers"


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_that_keeps_nothing_has_one_array_at_a_time(device: str) -> None:
    """Where ranks see no common disk, rank 0 alone writes what all gather."""

    def gathered(communicator: ThreadRank) -> dict[str, np.ndarray]:
        learner = learners[communicator.rank]
        learner.mesh = learner.mesh._replace(parts=communicator)
        return dict(learner.state(is_kept=communicator.rank == 0))

    learners = in_threads(2, lambda communicator: learner_on(device, communicator, "shard.stage=2"))
    (kept, nothing), most = most_bytes(lambda: in_threads(2, gathered))
    assert len(kept) == 3 * 2 * (LAYERS + 1) and not nothing
    assert most < 3 * WEIGHTS + 8 * LARGEST < 4 * WEIGHTS, (
        "beside it what travels: parts and wholes of one array, of both ranks"
    )


@pytest.mark.parametrize("device", DEVICES)
def test_a_memory_copy_takes_what_it_keeps(device: str) -> None:
    learner = learner_on(device, SingleProcessCommunicator())
    communicator = SingleProcessCommunicator()
    now, later = (TrainState(Progress(10 * step, 100, step, 24)) for step in (1, 2))
    copy, most = most_bytes(lambda: MemoryCopy(learner, communicator, now))  # type: ignore[arg-type]
    assert 3 * WEIGHTS <= most < 3 * WEIGHTS + LARGEST
    first = digest(copy._arrays)
    with torch.no_grad():
        for p in learner.parameters:
            p.add_(1)
    _, most = most_bytes(lambda: copy.keep(later))
    assert most < LARGEST
    assert digest(copy._arrays) == digest(learner.state()) != first


@pytest.mark.parametrize("device", DEVICES)
def test_rank_0_sends_its_first_state_array_by_array(device: str) -> None:
    learner = learner_on(device, SingleProcessCommunicator())
    found, most = most_bytes(lambda: broadcast_state(SingleProcessCommunicator(), learner, None))
    assert most < LARGEST and found == digest(learner.state())


@pytest.mark.parametrize("device", DEVICES)
def test_a_buffer_has_the_numbers_in_the_order_of_the_tensor(device: str) -> None:
    strided = (
        torch.arange(120.0, dtype=torch.float64)
        .view(2, 3, 4, 5)
        .contiguous(memory_format=torch.channels_last)
    )
    tensors = [
        strided,
        torch.tensor(7),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.arange(6.0)[::2],
        torch.eye(3).t(),
    ]
    staging = Counted() if device == "cuda" else AsOfAGpu()
    staging.expect(there := [tensor.to(device) for tensor in tensors])
    first = staging.read(there[1])
    for tensor, of_device in zip(tensors, there, strict=True):
        found = staging.read(of_device)
        assert np.array_equal(found, tensor.numpy()) and found.dtype == tensor.numpy().dtype
        assert not tensor.numel() or np.shares_memory(found, first), (
            "one buffer, as large as the largest from the beginning"
        )
    assert staging.read(there[0]).strides == strided.numpy().strides
    if device == "cuda":
        assert staging._buffer is not None and staging._buffer.is_pinned()


def test_what_lies_in_host_memory_is_not_copied() -> None:
    tensor = torch.arange(6.0)
    staging = Counted()
    staging.expect([tensor])
    assert np.shares_memory(staging.read(tensor), tensor.numpy()) and not staging.copied
