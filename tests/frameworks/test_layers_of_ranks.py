"""Ranks whose samples, or whose chance, call other layers: the weights of plain torch, or an error
that names layer, pass and ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from layers_on_ranks import TASK, all_samples, batch, not_waiting
from pool import on_ranks
from rank_threads import LIMIT_S, ThreadRank, in_threads
from ranks import FULL, needs_extra, needs_mpirun, of_this_copy
from torch import nn

from hvdtrain.comm.communicator import Buffer, SingleProcessCommunicator
from hvdtrain.comm.order import SameOrder
from hvdtrain.comm.threads import ThreadRanks
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.extras.batch_norms.use_norm import use_norm
from hvdtrain.extras.fully_sharded.torch.gathered_types import REDUCES_UNREACHED
from hvdtrain.training.build import build_learner

EXACT = [
    *(("InsideExperts", f"shard.stage={stage}", "") for stage in range(4)),
    *(("Experts", f"shard.stage={stage}", "") for stage in range(3)),
    ("InsideExperts", "shard.stage=3 batch.micro=2", ""),
    *(
        ("Alike", f"shard.stage=3{more}", "")
        for more in ("", " shard.reshard=false", " model.recompute=all")
    ),
    ("Again", "shard.stage=3", ""),
    ("Alike", "shard.stage=3 batch.micro=2 model.recompute=all", "not waiting"),
    *(
        (model, f"parallel.tensor=2{stage}", "alike")
        for stage in ("", " shard.stage=3")
        for model in ("Experts", "Alike")
    ),
    ("HiddenExperts", "parallel.pipeline=2", "alike"),
    ("ConvExperts", "parallel.dense=c", ""),
]
EXACT = [case for case in EXACT if of_this_copy([case[1]])]
REFUSED = {
    (
        "Experts",
        "shard.stage=3",
        "",
    ): "rank 0: forward pass of blocks.0; rank 1: forward pass of blocks.1",
    (
        "Experts",
        "shard.stage=3 model.recompute=all",
        "",
    ): "rank 0: forward pass of blocks.0; rank 1: forward pass of blocks.1",
    (
        "Experts",
        "shard.stage=3",
        "lagging",
    ): "rank 0: forward pass of blocks.0; rank 1: forward pass of blocks.1",
    (
        "EvaluatedExperts",
        "shard.stage=3",
        "not waiting",
    ): "rank 0: forward pass of blocks.1; rank 1: forward pass of blocks.0",
    (
        "NormExperts",
        "norm.kind=sync",
        "not waiting",
    ): "rank 0: forward pass of norms.0; rank 1: forward pass of norms.1",
    ("Drop", "shard.stage=3", ""): "rank 0: forward pass of blocks.",
    ("Depth", "shard.stage=3", ""): "; rank 1: end of the forward pass",
    (
        "Unreached",
        "shard.stage=3",
        "",
    ): "rank 0: backward pass of blocks.0; rank 1: reduction of the gradients of blocks.2",
    (
        "Unreached",
        "shard.stage=3 shard.reshard=false",
        "",
    ): "gradients of blocks.1; rank 1: reduction of the gradients of blocks.2",
    (
        "EvaluatedExperts",
        "shard.stage=3",
        "",
    ): "rank 0: forward pass of blocks.1; rank 1: forward pass of blocks.0",
    (
        "NormExperts",
        "norm.kind=sync",
        "",
    ): "rank 0: forward pass of norms.0; rank 1: forward pass of norms.1",
    (
        "OwnDrop",
        "parallel.tensor=2",
        "",
    ): "rank 0: forward pass of blocks.0.2; rank 1: forward pass of blocks.1.2",
    (
        "OwnDrop",
        "parallel.tensor=2 shard.stage=3",
        "",
    ): "rank 0: forward pass of blocks.0.2; rank 1: forward pass of blocks.1.2",
}
REFUSED = {case: text for case, text in REFUSED.items() if of_this_copy([case[1]])}


def needs_torch_2_13(engine: str) -> bool:
    return engine != "torchdist" and not REDUCES_UNREACHED


@pytest.mark.in_turn
@needs_mpirun
@pytest.mark.parametrize(
    "engine", ["mpi", *[pytest.param("torchdist", marks=pytest.mark.slow)] * FULL]
)
def test_ranks_with_other_layers_train_as_one_process_or_are_named(engine: str) -> None:
    found = on_ranks(engine, 2, "layers_on_ranks:outcomes", [*EXACT, *REFUSED])[0]
    assert len(found) == len(EXACT) + len(REFUSED)
    not_started = [
        case
        for case in (*EXACT, *REFUSED)
        if case[1] == "parallel.tensor=2 shard.stage=3" and needs_torch_2_13(engine)
    ]
    for case in not_started:
        for error in found[" ".join(case).strip()]:
            assert (
                isinstance(error, str)
                and "shard.stage=3 with parallel.tensor does not start on this engine with torch"
                in error
            )
    for case in EXACT:
        if case not in not_started:
            assert all(
                isinstance(apart, float) and apart < 1e-15
                for apart in found[" ".join(case).strip()]
            ), (case, found)
    for case, text in REFUSED.items():
        for error in found[" ".join(case).strip()] if case not in not_started else []:
            assert (
                isinstance(error, str)
                and "ranks use different layers (rank 0: " in error
                and text in error
            ), (case, error)
            (where, *_) = (
                key for key in ("parallel.tensor", "norm.kind", "shard.stage") if key in case[1]
            )
            assert f"where: {where}" in error and "fix: the same " in error


@needs_mpirun
def test_a_stall_would_be_reported_with_the_unit() -> None:
    for found in on_ranks("mpi", 2, "layers_on_ranks:under_way")[0]:
        assert found == ["forward pass of blocks.1", "backward pass of blocks.1", ""]


@needs_mpirun
@pytest.mark.parametrize(
    "engine", ["mpi", *[pytest.param("torchdist", marks=pytest.mark.slow)] * FULL]
)
def test_waiting_for_units_is_communication(engine: str) -> None:
    """4 units are gathered forward, of which backward gathers the 3 blocks anew and reduces all;
    each pass has an end of its own."""
    for entered in on_ranks(engine, 2, "layers_on_ranks:phases")[0]:
        assert entered[:1] == ["data"] and entered[-3:] == ["communication", "update", ""]
        forward = entered.index("forward")
        backward = entered.index("backward")
        assert entered[forward:backward] == ["forward", *["communication", "forward"] * 5]
        assert entered[backward:-3] == ["backward", *["communication", "backward"] * 7]


class CountsQuestions(ThreadRank):
    """As torchdist on a host with GPUs: NCCL reduces tensors on them, but not those of the CPU."""

    questions = 0
    features = ThreadRank.features | {"nccl", "ddp"}

    def allreduce(self, x: Buffer, name: str, op: str = "sum") -> Buffer:
        self.questions += name == "order"
        return super().allreduce(x, name, op)


def asked(of_ranks: list[list[str]], lags: bool = False) -> list[tuple[int, str]]:
    """How many questions each rank had an answer to, and its error; the last one is the end of its
    pass. lags: where the host does not wait for collectives."""

    def of_rank(communicator: ThreadRank) -> tuple[int, str]:
        order = SameOrder(communicator, 10 + communicator.rank, "the test", "the fix", lags=lags)
        questions = of_ranks[communicator.rank]
        for number, doing in enumerate(questions):
            try:
                (order.end if doing == questions[-1] else order.ask)(doing)
            except UserError as error:
                return number, error.what
        return len(questions), order.doing

    return in_threads(len(of_ranks), of_rank)


def test_what_ranks_are_about_to_do_is_compared() -> None:
    assert (
        asked([["a", "b", "end"]] * 3) == asked([["a", "b", "end"]] * 3, lags=True) == [(3, "")] * 3
    )
    other = "ranks use different layers (ranks 10, 12: b; rank 11: c)"
    assert asked([["a", "b", "end"], ["a", "c", "end"], ["a", "b", "end"]]) == [(1, other)] * 3
    assert (
        asked([["a", "b", "end"], ["a", "c", "end"], ["a", "b", "end"]], lags=True)
        == [(2, other)] * 3
    ), "at the end"
    fewer = "ranks use different layers (rank 10: b; rank 11: end)"
    assert asked([["a", "b", "end"], ["a", "end"]]) == [(1, fewer)] * 2
    assert asked([["a", "b", "end"], ["a", "end"]], lags=True) == [(2, fewer), (1, fewer)], (
        "the end waits for its answer"
    )
    late = "ranks use different layers (ranks 10-11: b; rank 12: c)"
    many = [str(i) for i in range(100)]
    assert asked([[*many, "b", "d", "end"]] * 2 + [[*many, "c", "end"]], lags=True) == [
        (102, late),
        (102, late),
        (101, late),
    ], "the first that differs is found among many, of ranks that did more or fewer"


def test_a_rank_that_evaluates_while_another_one_trains_is_named() -> None:
    def of_rank(communicator: ThreadRank) -> str:
        order = SameOrder(communicator, communicator.rank, "the test", "the fix", lags=True)
        order.ask("a")
        try:
            order.end("end of the forward pass", backward_follows=communicator.rank == 0)
            order.ask("b")
            order.end("end of the step")
        except UserError as error:
            return error.what
        return ""

    nothing = "nothing after the end of the forward pass"
    text = f"ranks use different layers (rank 0: b; rank 1: {nothing})"
    assert in_threads(2, of_rank) == [text] * 2


class DividedRank(ThreadRank):
    """With groups, as an engine has."""

    def split(self, color: int | None) -> DividedRank:
        colors = self.allgather_object(color)
        members = [rank for rank, theirs in enumerate(colors) if theirs == color]
        ranks = ThreadRanks(len(members))
        ranks.barrier = threading.Barrier(len(members), timeout=LIMIT_S)
        of_firsts = self.allgather_object(ranks)
        return DividedRank(of_firsts[members[0]], members.index(self.rank))


@needs_extra("pipeline")
@needs_extra("tensor")
def test_where_the_host_does_not_wait_an_evaluation_through_stages_is_compared_at_its_end() -> None:
    """Ranks 2 and 3 have the blocks; the collectives of all blocks are alike, so that nothing else
    shows it."""
    words = (
        "model.name=layers_on_ranks:StagedExperts parallel.pipeline=2 parallel.tensor=2 "
        "parallel.balance=[1,2] speed.device=cpu speed.precision=fp64 batch.size=8"
    )

    def of_rank(communicator: ThreadRank) -> list[str]:
        world = DividedRank(communicator._ranks, communicator.rank)
        learner: Any = build_learner(configure(None, words.split()), TASK, world)
        not_waiting(learner)
        own = learner.to_device(all_samples([batch(0, 0, "alike"), batch(1, 0, "alike")]))
        found = []
        for evaluated in (2, world.rank % 2):
            learner.model.evaluated = evaluated
            try:
                learner.evaluate(own)
            except UserError as error:
                found.append(error.what)
            found.append(",".join(order.doing for order in learner.orders))
        return found

    named = (
        "ranks use different layers (rank 2: forward pass of blocks.0.2; rank 3: forward pass of "
        "blocks.1.2)"
    )
    at = "end of the evaluation"
    assert in_threads(4, of_rank) == [["", ""]] * 2 + [["", named, at]] * 2


def test_where_the_host_does_not_wait_a_step_of_any_depth_asks_once() -> None:
    """Each question costs messages one after the other, more with more ranks."""
    for depth in (1, 100):

        def of_rank(communicator: ThreadRank, depth: int = depth) -> int:
            ranks = CountsQuestions(communicator._ranks, communicator.rank)
            order = SameOrder(ranks, ranks.rank, "the test", "the fix", lags=True)
            for _ in range(3):  # passes of a step
                for layer in range(depth):
                    order.ask(f"forward pass of {layer}")
                order.end("end of the forward pass", backward_follows=True)
                assert not order.doing
                for layer in range(depth):
                    order.ask(f"backward pass of {layer}")
                    assert order.doing == f"backward pass of {layer}", "for the report of a stall"
            order.end("end of the step")
            return ranks.questions

        assert in_threads(2, of_rank) == [1, 1]


class Norms(nn.Module):
    """Two norms of one width. A rank calls those of `called`, and the loss has those of `used`."""

    def __init__(self, called: list[int], used: list[int]) -> None:
        super().__init__()
        self.called = called
        self.used = used
        self.first = nn.Linear(3, 4)
        self.norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        parts = {i: self.norms[i](h) for i in self.called}
        return torch.stack([parts[i].square() for i in self.used]).sum()


def asked_by_norms(called: list[list[int]], used: list[list[int]]) -> list[int | str]:
    """How many questions each rank asked in a step and an evaluation, or its error."""

    def of_rank(communicator: ThreadRank) -> int | str:
        ranks = CountsQuestions(communicator._ranks, communicator.rank)
        model = use_norm(Norms(called[ranks.rank], used[ranks.rank]), "sync", 1, "averaged", ranks)
        try:
            model(torch.ones(2 + ranks.rank, 3)).backward()
            model.eval()(torch.ones(2, 3))
        except UserError as error:
            return error.what
        return ranks.questions

    return in_threads(len(called), of_rank)


def test_ranks_that_come_to_other_synchronized_norms_are_named() -> None:
    """Of equal width, so that their statistics would be mixed."""
    assert asked_by_norms([[0, 1]], [[0, 1]]) == [0], "one rank asks nobody"
    assert asked_by_norms([[0, 1]] * 2, [[0, 1]] * 2) == [5] * 2, (
        "each norm in both directions, and the end of the forward pass"
    )
    of = "ranks use different layers (rank 0: {}; rank 1: {})"
    for called, used, text in (
        ([[0], [1]], [[0], [1]], of.format("forward pass of norms.0", "forward pass of norms.1")),
        (
            [[0, 1], [0]],
            [[0], [0]],
            of.format("forward pass of norms.1", "end of the forward pass"),
        ),
        (
            [[0, 1], [0, 1]],
            [[0], [1]],
            of.format("backward pass of norms.0", "backward pass of norms.1"),
        ),
    ):
        assert asked_by_norms(called, used) == [text] * 2


@needs_extra("dense")
@pytest.mark.parametrize("updates", [1, 2])
def test_a_dense_part_is_called_once_in_a_pass(updates: int) -> None:
    """On a rank that calls it twice, or not, the others would wait."""
    for times, how_often in {0: "not", 2: "twice"}.items():
        words = (
            f"model.name=layers_on_ranks:OftenDense model.times={times} parallel.dense=c "
            f"parallel.dense_updates={updates}"
        )
        learner = build_learner(configure(None, words.split()), TASK, SingleProcessCommunicator())
        own = learner.to_device(all_samples([batch(0, 0, ""), batch(1, 0, "")]))
        with pytest.raises(
            UserError,
            match=f"a forward pass of the model calls 'dense' {how_often}, but all ranks compute "
            "it together exactly once",
        ):
            learner.step([own], Hyper(0.1, 0.0, 0.0, len(own)), 0)
