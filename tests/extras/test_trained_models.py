"""The model of a run for evaluation: on several ranks each reads its own part of the weights."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_threads import Counting, ThreadRank, in_threads
from ranks import needs_extra, of_this_copy

from hvdtrain.comm.communicator import (
    Buffer,
    Communicator,
    Handle,
    SingleProcessCommunicator,
    part_of,
)
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Arrays, Batch, Piece, whole
from hvdtrain.extras.trained_models.saved_weights import find_checkpoint
from hvdtrain.extras.trained_models.trained_model import TrainedModel, load_trained_model
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner
from hvdtrain.training.checkpoint import files, load, shards, sums
from hvdtrain.training.checkpoint.shards import CheckpointShard, WrittenByAll, write_parts
from hvdtrain.training.progress.train_state import Progress, TrainState

pytestmark = pytest.mark.usefixtures("jax_compilation_cache")

CHUNK_BYTES = 2**12
TASK = Classification((4, 4, 2), 3, np.array([0.4, 0.5]), np.array([0.2, 0.3]))
MLP = "model.name=mlp model.widths=[64,48] speed.precision=fp64 batch.size=12"
STAGE_3 = f"framework=jax {MLP} shard.stage=3"
AVERAGED = f"framework=torch {MLP} optim.ema=0.9"
RANKS = 2


class Sender(Counting):
    """Counts all bytes that this rank sends to others."""

    def start_spread(self, x: Buffer, name: str) -> Handle:
        self.sent += x[part_of(len(x), self.rank, self.size)].nbytes
        return super().start_spread(x, name)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sums, shards, load):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES)


def state_of(words: str, factor: float) -> Arrays:
    """A state that no job begins with, of the learner of one process."""
    config = configure(None, words.split())
    learner: Any = build_learner(config, TASK, SingleProcessCommunicator())
    rng = np.random.default_rng(3)
    return {
        piece.name: np.asarray(factor * rng.normal(size=piece.shape), piece.dtype)
        for piece in learner.pieces()
    }


def write(run: Path, step: int, state: Arrays) -> None:
    """A checkpoint of two ranks, each with a half of every array."""
    run.mkdir(exist_ok=True)
    name = files.unfinished_name(step, "0123456789abcdef")
    parts = [
        CheckpointShard(
            [_half(name, array, rank) for name, array in state.items()],
            files.ARRAYS,
            files.file_of,
            rank,
        )
        for rank in range(RANKS)
    ]
    other = threading.Thread(target=write_parts, args=(parts[1], run, name, lambda: False))
    other.start()
    by_all = WrittenByAll(parts[0], range(1, RANKS), [""] * RANKS, name)
    files.write(run, _now(step), by_all, {"data": {}})
    other.join()


def _half(name: str, array: np.ndarray, rank: int) -> Piece:
    own = part_of(array.size, rank, RANKS)
    return whole(name, array.reshape(-1)[own])._replace(
        shape=array.shape, start=own.start, stop=own.stop, is_whole=False, is_mine=True
    )


def _now(step: int) -> TrainState:
    return TrainState(Progress(10, 100, step, 24))


def loaded(communicator: Communicator, run: Path, words: str) -> TrainedModel:
    return load_trained_model(
        configure(None, words.split()),
        communicator,
        lambda reading: find_checkpoint(run, "", reading),
        lambda config, facts: TASK,
    )


def predicted(model: TrainedModel, rank: int = 0) -> np.ndarray:
    """(4, classes), of samples of this rank's own."""
    x = np.random.default_rng(rank).integers(0, 256, (4, *TASK.shape), dtype=np.uint8)
    batch: Batch = {"x": x, "y": np.zeros(4, np.int64)}
    outputs = model.learner.predict(model.learner.to_device(batch)).outputs
    return np.asarray(outputs)


def on_ranks(run: Path, words: str) -> tuple[list[int], list[TrainedModel]]:
    """Compares what each of two ranks predicts with one process; returns the bytes that each sent
    for it to load the model, and the models."""
    alone = loaded(SingleProcessCommunicator(), run, words)

    def of_rank(thread: ThreadRank) -> tuple[int, TrainedModel]:
        own = Sender(thread._ranks, thread.rank)
        model = loaded(own, run, words)
        sent = own.sent
        np.testing.assert_allclose(
            predicted(model, own.rank), predicted(alone, own.rank), rtol=1e-12, atol=1e-12
        )
        return sent, model

    found = in_threads(RANKS, of_rank)
    return [sent for sent, _ in found], [model for _, model in found]


@pytest.mark.parametrize("words", [*of_this_copy([STAGE_3]), AVERAGED])
def test_each_rank_reads_its_part(words: str, tmp_path: Path) -> None:
    """With stage 3 only small arrays are sent; of arrays that every rank has, each sends a half. Of
    a checkpoint that one rank wrote, rank 0 sends all. Nothing is sent of initial weights."""
    state = state_of(words, 1.0)
    weights = {name: array for name, array in state.items() if name.startswith("p.")}
    total = sum(array.nbytes for array in weights.values())
    small = sum(array.nbytes for array in weights.values() if array.nbytes < CHUNK_BYTES)
    write(tmp_path / "parts", 3, state)
    sent, models = on_ranks(tmp_path / "parts", words)
    assert sum(sent) == (small if words == STAGE_3 else total)
    assert sent[0] < 0.6 * total
    (tmp_path / "whole").mkdir()
    files.write(tmp_path / "whole", _now(3), state, {"data": {}})
    sent, by_rank_0 = on_ranks(tmp_path / "whole", words)
    assert sent == [total, 0]
    for model, other in zip(models, by_rank_0, strict=True):
        for ours, theirs in zip(model.learner.pieces(), other.learner.pieces(), strict=True):
            assert ours.name[:2] == "s." or ours.read().tobytes() == theirs.read().tobytes()


@needs_extra("fully_sharded")
def test_a_chunk_that_one_rank_finds_damaged(tmp_path: Path) -> None:
    write(tmp_path, 3, state_of(STAGE_3, 1.0))
    write(tmp_path, 6, state_of(STAGE_3, 2.0))
    path = tmp_path / "checkpoints" / "step-00000006" / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    _, models = on_ranks(tmp_path, STAGE_3)
    for model in models:
        assert model.checkpoint.folder.name == "step-00000003"
        note, *_ = model.notes
        assert note.startswith("damaged step-00000006 is skipped: weights.safetensors")
