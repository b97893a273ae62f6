"""plan --memory: the memory of many ranks from that of two."""

from __future__ import annotations

import pytest
from memory_on_ranks import predicted
from ranks import FULL

from hvdtrain.extras.plan.forecast import memory


@pytest.mark.parametrize("stage", [2, *[pytest.param(3, marks=pytest.mark.slow)] * FULL])
def test_what_more_ranks_take_is_computed_from_two(stage: int) -> None:
    """As plan --memory does, of a model whose blocks have many sizes."""
    words = ["model.name=wide_resnet", "model.widths=[16,32,64,128]", f"shard.stage={stage}"]
    two, eight = (predicted(*words, ranks=ranks, samples=2) for ranks in (2, 8))
    weights = predicted(*words[:2], samples=1).weights
    computed = memory.on_ranks(two, stage, 2, 8, weights)
    assert computed.step == pytest.approx(eight.step, rel=0.05)
    assert computed.evaluation == pytest.approx(eight.evaluation, rel=0.01)
    assert computed.checkpoint == pytest.approx(eight.checkpoint, rel=0.01) and min(computed) >= 0
    assert computed.largest_array == eight.largest_array
