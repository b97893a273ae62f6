"""shard.stage=1 and 2 under autocast: between sync points weights travel in 16 bits where passes
read no more of them, and every number stays the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from half_types_on_ranks import IMAGES
from rank_threads import ThreadRank, in_threads

from hvdtrain.comm.communicator import Buffer, Handle, SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Arrays
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.torch.parallel import zero_1_and_2
from hvdtrain.training.build import build_learner

WORDS = (
    "model.name=half_types_on_ranks:Odd optim.name=adam optim.clip_norm=0.5 comm.bucket_mb=0.002"
)
SYNC_AFTER = (3, 6)  # steps


class CountsSpread(ThreadRank):
    """Counts the bytes of weights that ranks send each other."""

    def __init__(self, rank: ThreadRank) -> None:
        super().__init__(rank._ranks, rank.rank)
        self.sent = {"int16": 0, "float32": 0}

    def start_spread(self, x: Buffer, name: str) -> Handle:
        if name.startswith("weights."):
            self.sent[str(x.dtype).removeprefix("torch.")] += x.nbytes
        return super().start_spread(x, name)


def learner_on(rank: Any, stage: int, words: str) -> Any:
    return build_learner(
        configure(None, f"{WORDS} shard.stage={stage} {words}".split()), IMAGES, rank
    )


def trained(
    size: int, stage: int, words: str = "speed.precision=bf16"
) -> list[tuple[Arrays, list[dict[str, int]], list[bool]]]:
    """Of each rank: its state at the end, bytes sent until each sync point, and whether weights
    were rounded before it."""
    first = learner_on(SingleProcessCommunicator(), 0, words).state()

    def of_rank(thread: ThreadRank) -> tuple[Arrays, list[dict[str, int]], list[bool]]:
        rank = CountsSpread(thread)
        learner = learner_on(rank, stage, words)
        # ranks that are threads draw from one generator
        learner.load(first | {k: v for k, v in learner.state().items() if not k.startswith("p.")})
        sent = []
        rounded = []
        for step in range(SYNC_AFTER[-1]):
            rng = np.random.default_rng(10 * step + rank.rank)
            batch = {
                name: rng.integers(0, 10, (2, *field.shape)).astype(field.dtype)
                for name, field in IMAGES.fields.items()
            }
            learner.step([learner.to_device(batch)], Hyper(0.1, 0.9, 0.0, 2 * size, step), step)
            if step + 1 in SYNC_AFTER:
                rounded.append(any(bucket.is_rounded for bucket in learner.strategy._buckets))
                learner.sync_buffers(rank)
                sent.append(dict(rank.sent))
        return learner.state(), sent, rounded

    return in_threads(size, of_rank)


@pytest.mark.parametrize(("size", "stage"), [(2, 1), (3, 2)])
def test_weights_in_16_bits_train_as_whole_ones(
    size: int, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, the weights of a router, norms and what else is read in float32 too."""
    found = trained(size, stage)
    monkeypatch.setattr(zero_1_and_2, "MOST_APART", 10**9)
    whole = trained(size, stage)
    for (state, sent, rounded), (expected, sent_whole, never) in zip(found, whole, strict=True):
        assert state.keys() == expected.keys()
        for name, array in expected.items():
            assert np.array_equal(state[name], array), name
        assert rounded == [False, True] and never == [False, False]
        first, both = sent
        of_step = first["float32"] // 3
        assert first["int16"] == 0 and sent_whole[-1] == {"int16": 0, "float32": 6 * of_step}
        in_16 = both["int16"] // 3  # of a step
        assert in_16 * 2 > 0.35 * of_step, "5,194 of 12,630 weights are cast"
        assert both["float32"] == 3 * of_step + 3 * (of_step - 2 * in_16) + 2 * in_16, (
            "whole once, at the sync point"
        )


def test_without_autocast_weights_travel_whole() -> None:
    for _, sent, rounded in trained(2, 1, "speed.precision=fp32"):
        assert sent[-1]["int16"] == 0 and rounded == [False, False]
