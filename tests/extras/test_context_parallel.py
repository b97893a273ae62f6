"""Attention of ranks that divide the positions of a sequence, against attention in one process;
ranks are threads. And what cannot be divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_threads import ThreadRank, in_threads

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.comm.counted import Moved, counted
from hvdtrain.extras.context_parallel import blocks
from hvdtrain.extras.context_parallel.blocks import AttentionRule
from hvdtrain.extras.context_parallel.division import DivisionByPositions
from hvdtrain.extras.context_parallel.link import ContextLink
from hvdtrain.extras.context_parallel.positions import PositionsOfRanks
from hvdtrain.extras.context_parallel.ring import RingLayer, ring_attention
from hvdtrain.extras.context_parallel.ulysses import Exchange, by_heads, by_positions
from hvdtrain.frameworks.torch.call import positions_of

ALONE = ContextLink(SingleProcessCommunicator())  # type: ignore[arg-type]
HEADS = 4
FEATURES = 6
SAMPLES = 2


def tensors(length: int, heads_of_keys: int = HEADS) -> list[torch.Tensor]:
    """Returns queries, keys, values and the gradient of the outputs, (n, heads, length, e)."""
    torch.manual_seed(length)
    heads = (HEADS, heads_of_keys, heads_of_keys, HEADS)
    return [torch.randn(SAMPLES, count, length, FEATURES, dtype=torch.float64) for count in heads]


def in_one_process(
    whole: list[torch.Tensor], causal: bool, segments: torch.Tensor | None
) -> list[torch.Tensor]:
    """Returns the outputs of torch's attention, and the gradients of queries, keys and values."""
    *inputs, doutputs = (x.clone() for x in whole)
    for x in inputs:
        x.requires_grad_()
    times = inputs[0].shape[1] // inputs[1].shape[1]
    keys, values = (x.repeat_interleave(times, 1) for x in inputs[1:])
    scores = inputs[0] @ keys.transpose(2, 3) * FEATURES**-0.5
    length = scores.shape[-1]
    seen = torch.ones(length, length, dtype=torch.bool)
    seen = (seen.tril() if causal else seen).expand(SAMPLES, 1, length, length)
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None])[:, None]
    outputs = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values
    return [outputs.detach(), *torch.autograd.grad(outputs, inputs, doutputs)]


def divided(
    ranks: int,
    whole: list[torch.Tensor],
    by: str,
    causal: bool,
    segments: torch.Tensor | None = None,
    moved: list[list[Moved]] | None = None,
) -> list[torch.Tensor]:
    """Returns what in_one_process() does, put together from the parts of ranks."""
    length = whole[0].shape[2]
    positions = PositionsOfRanks(length, ranks, zigzag=by == "ring")

    def of_rank(communicator: ThreadRank) -> list[torch.Tensor]:
        used: Any = communicator
        if moved is not None:
            used = counted(used, moved[communicator.rank])
        link = ContextLink(used)
        *inputs, doutputs = (x[:, :, positions.of(link.rank)].clone() for x in whole)
        for x in inputs:
            x.requires_grad_()
        rule = AttentionRule(causal, FEATURES**-0.5, segments)
        if by == "ring":
            outputs = ring_attention(*inputs, RingLayer(link, "layer", positions, rule))
        else:
            exchange = Exchange(link, "layer", positions)
            parts = by_heads(*inputs, exchange)
            alone = RingLayer(
                link.alone(), "layer", PositionsOfRanks(length, 1, zigzag=False), rule
            )
            outputs = by_positions(ring_attention(*parts, alone), exchange)
        return [outputs.detach(), *torch.autograd.grad(outputs, inputs, doutputs)]

    parts = in_threads(ranks, of_rank)
    order = torch.cat([positions.of(rank) for rank in range(ranks)]).argsort()
    return [torch.cat(of_ranks, 2)[:, :, order] for of_ranks in zip(*parts, strict=True)]


@pytest.mark.parametrize("by", ["ring", "ulysses"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["causal", "all", "packed", "shared heads"])
@pytest.mark.parametrize("tile", [3, 1024])
def test_attention_is_that_of_one_process(
    monkeypatch: pytest.MonkeyPatch, by: str, ranks: int, kind: str, tile: int
) -> None:
    monkeypatch.setattr(blocks, "TILE", tile)
    length = 21  # chunks of ranks differ
    whole = tensors(length, HEADS if kind != "shared heads" else HEADS // 2 * (1 + (ranks == 4)))
    segments = None
    if kind == "packed":
        rows = [[1] * 9 + [2] * 2 + [3] * 8 + [0] * 2, [1] * 4 + [2] * 17]
        segments = torch.tensor(rows)
    expected = in_one_process(whole, kind != "all", segments)
    found = divided(ranks, whole, by, kind != "all", segments)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-13


def test_values_may_have_other_features_and_queries_any_memory_order() -> None:
    """torch's flash attention fails for the first, and reads wrong numbers of the second."""
    queries, keys, *_ = tensors(7)
    values, doutputs = torch.randn(2, SAMPLES, HEADS, 7, FEATURES + 3, dtype=torch.float64)
    for whole in (
        [queries, keys, values, doutputs],
        [queries.transpose(2, 3).contiguous().transpose(2, 3), keys, keys + 1, queries],
    ):
        expected = in_one_process(whole, True, None)
        positions = PositionsOfRanks(7, 1, zigzag=True)
        layer = RingLayer(ALONE, "layer", positions, AttentionRule(True, FEATURES**-0.5))
        inputs = [x.detach().requires_grad_() for x in whole[:3]]
        outputs = ring_attention(*inputs, layer)
        found = [outputs, *torch.autograd.grad(outputs, inputs, whole[3])]
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() < 1e-13


@pytest.mark.parametrize("size", [0, 1])
def test_positions_of_packed_rows_may_count_from_the_row(size: int) -> None:
    """A module that is called with one row of indices gets the positions in the row; one that is
    called with (n, positions) gets those in each sequence."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.Identity()
            self.places = torch.nn.Embedding(6, 4)

        def forward(self, tokens: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
            at = torch.arange(tokens.shape[1]) if size == 0 else positions_of(segments)
            return self.places(at) + tokens[..., None]

        def context_plan(self) -> dict[str, str]:
            return {"attention": "attention", "places": "positions"}

    model = Model()
    inputs = {"tokens": torch.arange(12).view(2, 6), "segments": torch.tensor([[1, 1, 2, 2, 2, 0]])}
    inputs["segments"] = inputs["segments"].expand(2, 6)
    expected = model(**inputs)
    DivisionByPositions(model, ALONE, "ring", "parallel.context")
    assert torch.equal(model(**inputs).local, expected)


@pytest.mark.parametrize(
    ("by", "ranks"), [("ring", 2), ("ring", 4), ("ulysses", 2), ("ulysses", 4)]
)
def test_bytes_are_those_of_the_formula(by: str, ranks: int) -> None:
    length = 8 * ranks
    moved: list[list[Moved]] = [[] for _ in range(ranks)]
    divided(ranks, tensors(length), by, causal=True, moved=moved)
    numbers = SAMPLES * HEADS * length * FEATURES
    per_rank = 6 / ranks if by == "ring" else 8 / ranks**2
    expected = 8 * int(per_rank * (ranks - 1) * numbers)
    assert {sum(one.sent_bytes for one in of_rank) for of_rank in moved} == {expected}
    if by == "ring":
        backward = [one for one in moved[0] if not one.name.endswith("forward")]
        assert 3 * sum(one.sent_bytes for one in backward) == 2 * expected


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("length", [8, 13, 24])
def test_positions_are_those_of_one_rank_each_and_their_work_is_alike(
    ranks: int, length: int
) -> None:
    positions = PositionsOfRanks(length, ranks, zigzag=True)
    everyone = torch.cat([positions.of(rank) for rank in range(ranks)])
    assert sorted(everyone.tolist()) == list(range(length))
    # a position attends to itself and all before it
    products = [int((positions.of(rank) + 1).sum()) for rank in range(ranks)]
    if not length % (2 * ranks):
        assert len(set(products)) == 1
    assert max(products) - min(products) <= 2 * length
    assert [positions.count(rank) for rank in range(ranks)] == [
        len(positions.of(rank)) for rank in range(ranks)
    ]


def test_dropout_drops_the_same_weights_in_both_passes() -> None:
    """The gradient is that of the outputs with the weights that were dropped: by differences."""
    queries, keys, values, doutputs = tensors(6)
    positions = PositionsOfRanks(6, 1, zigzag=True)
    rule = AttentionRule(True, 0.5, dropout=0.4, seed=11)
    layer = RingLayer(ALONE, "layer", positions, rule)

    def loss(values: torch.Tensor, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        return (ring_attention(queries, keys, values, layer) * doutputs).sum()

    inputs = [x.requires_grad_() for x in (values, keys, queries)]
    assert torch.autograd.gradcheck(loss, inputs)
    assert loss(*inputs) == loss(*inputs)
    other = layer._replace(rule=rule._replace(seed=12))
    assert (
        ring_attention(queries, keys, values, other) != ring_attention(queries, keys, values, layer)
    ).any()
