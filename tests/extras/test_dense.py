"""Dense layers cut over ranks: schemes a, b and c give the losses and gradients of one process, to
rounding."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from pool import on_ranks
from rank_threads import ThreadRank, in_threads
from ranks import FULL, needs_horovod, needs_mpirun
from torch import nn

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.errors import UserError
from hvdtrain.extras.dense.cut import (
    AdjointExchange,
    ColumnParallelChain,
    Turn,
    rows_of_turns,
    rows_of_updates,
    turn_learning_rate,
)
from hvdtrain.extras.dense.hybrid import HybridModel
from hvdtrain.frameworks.torch.models import mlp

slow = pytest.mark.slow
STARTS = [
    pytest.param("mpi", 3, marks=[needs_mpirun, slow]),
    *[
        pytest.param("mpi", 2, marks=[needs_mpirun, slow]),
        pytest.param("mpi", 4, marks=[needs_mpirun, slow, pytest.mark.ranks4]),
        pytest.param("horovod", 2, marks=[needs_mpirun, needs_horovod, slow]),
        pytest.param("torchdist", 2, marks=[needs_mpirun, slow]),
    ]
    * FULL,
]


@functools.cache
def found(engine: str, size: int) -> list[dict[str, float]]:
    """By rank."""
    return on_ranks(engine, size, "dense_on_ranks:by_case")


@pytest.mark.parametrize("scheme", ["a", "b", "c"])
@pytest.mark.parametrize(("engine", "size"), STARTS)
def test_every_scheme_gives_the_losses_and_gradients_of_one_process(
    engine: str, size: int, scheme: str
) -> None:
    """With uneven and empty shares, and with neurons that the number of ranks does not divide, or
    that are fewer."""
    for rank in found(engine, size):
        gaps = [
            gap
            for case, gap in rank.items()
            if case.endswith(f" {scheme}") and not case.startswith("faulty")
        ]
        assert len(gaps) == 7 and max(gaps) < 1e-12, rank
        assert rank[f"faulty {scheme}"] > 1e-3, (
            "gradients that are not summed over ranks must be noticed"
        )


def test_rows_of_turns_by_hand() -> None:
    def lists(turns: list[Turn]) -> list[list[list[int]]]:
        return [[list(own) for own in turn] for turn in turns]

    first = [0, 1, 2, 3, 4]
    none = list[int]()
    assert lists(rows_of_turns("a", [3, 0, 5])) == [[[0, 1, 2], none, first]]
    assert lists(rows_of_turns("b", [3, 0, 5])) == [[[0, 1, 2], none, none], [none, none, first]]
    assert lists(rows_of_turns("c", [3, 0, 5])) == [
        [[0], none, [0, 1]],
        [[1], none, [2, 3]],
        [[2], none, [4]],
    ]
    assert lists(rows_of_turns("c", [1, 0, 1])) == [[[0], none, [0]]]
    assert (
        rows_of_turns("a", [0, 0]) == rows_of_turns("b", [0, 0]) == rows_of_turns("c", [0, 0]) == []
    )


def test_a_turn_with_an_update_has_the_same_samples_on_any_number_of_ranks() -> None:
    """By hand for 8 samples in 3 turns: in b neighbours, the first turns one more; in c each
    third."""
    expected = {"b": [[0, 1, 2], [3, 4, 5], [6, 7]], "c": [[0, 3, 6], [1, 4, 7], [2, 5]]}
    for shares in ([8], [4, 4], [3, 0, 5], [2, 2, 2, 2], [1, 6, 1]):
        firsts = [sum(shares[:rank]) for rank in range(len(shares))]
        for scheme in ("b", "c"):
            turns = rows_of_updates(scheme, shares, 3)
            assert [
                [first + row for first, own in zip(firsts, turn, strict=True) for row in own]
                for turn in turns
            ] == expected[scheme]
    assert rows_of_updates("b", [2, 2], 2) == rows_of_turns("b", [2, 2]), "the paper's scheme"
    assert [list(map(len, turn)) for turn in rows_of_updates("c", [4, 4], 2)] == [
        list(map(len, turn)) for turn in rows_of_turns("c", [4, 4])
    ]
    assert len(rows_of_updates("c", [1, 1], 3)) == 2


def test_turn_learning_rate_is_in_proportion() -> None:
    assert turn_learning_rate(0.08, 128, 1024) == pytest.approx(0.01, rel=1e-15)


class BodyAndHead(nn.Sequential):
    dense_part = "1"

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        )
        self.double()


def test_in_a_step_of_several_updates_every_gradient_is_a_mean_over_its_samples() -> None:
    """7 samples on ranks that are threads, in turns of 4 and 3: of the dense part over a turn, of
    what is in front of it over the step."""
    whole = BodyAndHead()
    x = torch.randn(7, 3, dtype=torch.float64)
    shares = [slice(0, 5), slice(5, 7)]
    squares = whole(x).square().sum(1)
    body = list(whole[0].parameters())
    head = list(whole[1].parameters())
    of_body = torch.autograd.grad(squares.mean(), body, retain_graph=True)
    of_head = torch.autograd.grad(squares[:4].mean() + squares[4:].mean(), head)

    def of_rank(rank: ThreadRank) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = copy.deepcopy(whole)
        hybrid = HybridModel(model, rank, "b")
        for turn in hybrid.turns(x[shares[rank.rank]], 2):
            (turn.outputs.square().sum() / turn.samples).backward()
        return [p.grad for p in model[0].parameters()], [p.grad for p in hybrid.dense_parameters()]

    ranks_found = in_threads(2, of_rank)
    for expected, *of_ranks in zip(of_body, *(found for found, _ in ranks_found), strict=True):
        torch.testing.assert_close(sum(of_ranks), expected, rtol=1e-12, atol=1e-14)
    for expected, *parts in zip(of_head, *(found for _, found in ranks_found), strict=True):
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-12, atol=1e-14)


def test_one_process_has_the_model_as_it_was() -> None:
    """What is in front of the first linear layer works on own rows; without samples the output is
    empty, and all gradients are 0."""
    torch.manual_seed(2)
    whole = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    torch.manual_seed(2)
    cut = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    holder = nn.Sequential(cut)
    x = torch.randn(4, 2, 3)
    holder.dense_part = "0"
    hybrid = HybridModel(holder, SingleProcessCommunicator(), "c")
    torch.testing.assert_close(hybrid(x), whole(x), rtol=0, atol=0)
    assert [name for name, _ in holder.named_parameters()] == [
        "0.1.weight",
        "0.1.bias",
        "0.3.weight",
        "0.3.bias",
    ]
    empty = hybrid(x[:0])
    assert empty.shape == (0, 3)
    empty.sum().backward()
    assert all(torch.count_nonzero(p.grad) == 0 for p in hybrid.dense_parameters())
    for p in hybrid.dense_parameters():
        p.requires_grad_(False)
    hybrid(
        x[:0]
    ).sum().backward()  # a part of the backward pass of the other ranks, whose convolutions learn


def test_dense_parts_that_cannot_be_cut_are_refused() -> None:
    class Own(nn.Module):
        dense_part = "head"

        def __init__(self, head: nn.Module) -> None:
            super().__init__()
            self.head = head

    twice = nn.Linear(2, 2)
    act = nn.ReLU()

    class Scaled(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.1 * super().forward(x)

    chain = Own(nn.Sequential(nn.Linear(2, 2), act, nn.Linear(2, 2), act))
    x = torch.rand(3, 2)
    expected = chain.head(x)
    # `act` is there twice
    assert torch.equal(
        ColumnParallelChain(chain.head, AdjointExchange(SingleProcessCommunicator()), "head", "")(
            x
        ),
        expected,
    )
    refused = {
        "'head' contains the same linear layer twice": Own(nn.Sequential(twice, act, twice)),
        "'head', the dense part, has no linear layer": Own(Scaled(nn.Linear(2, 2))),
        "MLP has no attribute `dense_part`": mlp.build("mlp", (2, 2, 1), 3),
        "head.1 is BatchNorm1d, which cannot be divided by neurons": Own(
            nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        ),
    }
    for message, model in refused.items():
        with pytest.raises(UserError) as error:
            HybridModel(model, SingleProcessCommunicator(), "a", "job.yaml:3")
        assert (
            message in str(error.value)
            and "where: job.yaml:3" in str(error.value)
            and "fix:" in str(error.value)
        )
