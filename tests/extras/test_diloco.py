"""comm.outer_lr, comm.outer_momentum, comm.fragments and comm.differences: ranks in threads against
workers in NumPy, resumed on as many ranks and on others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from faults import Command, ends_as_straight, kill, kills
from numpy_workers import (
    LAYERS,
    NAMES,
    Worker,
    batch,
    check_equal,
    first_weights,
    mean,
    train,
)
from pool import on_ranks
from ranks import FULL, needs_horovod, needs_mpirun
from refusals import refusal_of_job

from hvdtrain.core.arrays import Arrays
from hvdtrain.errors import UserError
from hvdtrain.extras.diloco.fragments import layer_of, strided
from hvdtrain.extras.diloco.int16 import pack, sum_in_int16, unpack
from hvdtrain.extras.diloco.outer import OuterOptimizer

OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9
LOCAL_STEPS = 4
OUTER = (
    f"comm.local_steps={LOCAL_STEPS}",
    f"log.every_steps={LOCAL_STEPS}",
    f"comm.outer_lr={OUTER_LR}",
    f"comm.outer_momentum={OUTER_MOMENTUM}",
)


class Simulation:
    """DiLoCo on `size` workers in NumPy."""

    def __init__(self, size: int, fragments: int, *, in_16_bits: bool) -> None:
        self.size = size
        self.workers = [Worker(first_weights()) for _ in range(size)]
        self.common = first_weights()
        self.b = {name: np.zeros_like(a) for name, a in self.common.items()}
        self.e = {name: np.zeros((size, *a.shape)) for name, a in self.common.items()}
        self.in_16_bits = in_16_bits
        self.fragments = [
            [n for i, layer in enumerate(LAYERS) if i % fragments == f for n in NAMES if layer in n]
            for f in range(fragments)
        ]
        self.since = [0] * fragments
        self.steps = 0

    def train_together(self, steps: range) -> None:
        """With the mean gradient, as one process."""
        for step in steps:
            samples = [batch(rank, step) for rank in range(self.size)]
            total = sum(len(one["y"]) for one in samples)
            each = [self.workers[0].gradient(one, total) for one in samples]
            for worker in self.workers:
                worker.step({name: sum(one[name] for one in each) for name in NAMES})
        self.common = {name: array.copy() for name, array in self.workers[0].w.items()}

    def train(self, steps: range, sync_steps: tuple[int, ...]) -> None:
        for step in steps:
            for rank, worker in enumerate(self.workers):
                worker.local_step(batch(rank, step))
            self.steps += 1
            for f in range(len(self.fragments)):
                if (self.steps - f * LOCAL_STEPS // len(self.fragments)) % LOCAL_STEPS == 0:
                    self.exchange(f)
            if step + 1 in sync_steps:
                self.synchronize()

    def synchronize(self) -> None:
        for f, exchanged in enumerate(self.since):
            if exchanged < self.steps:
                self.exchange(f)
        state = mean([worker.v for worker in self.workers])
        for worker in self.workers:
            worker.v = {name: array.copy() for name, array in state.items()}
        self.steps = 0
        self.since = [0] * len(self.fragments)

    def exchange(self, f: int) -> None:
        self.since[f] = self.steps
        for name in self.fragments[f]:
            away = np.array([self.common[name] - worker.w[name] for worker in self.workers])
            gradient = self.rounded_mean(name, away) if self.in_16_bits else away.mean(axis=0)
            self.b[name] = OUTER_MOMENTUM * self.b[name] + gradient
            nesterov = gradient + OUTER_MOMENTUM * self.b[name]
            self.common[name] = self.common[name] - OUTER_LR * nesterov
            for worker in self.workers:
                worker.w[name] = self.common[name].copy()

    def rounded_mean(self, name: str, away: np.ndarray) -> np.ndarray:
        wanted = away / self.size + self.e[name]
        unit = np.abs(wanted).max() / (32767 // self.size)
        sent = np.rint(wanted / unit) * unit
        self.e[name] = wanted - sent
        return np.asarray(sent.sum(axis=0))

    def state(self) -> Arrays:
        momentum = {f"s.{name}@outer_momentum": b for name, b in self.b.items()}
        residuals = {f"s.{name}@residual": e for name, e in self.e.items() if self.in_16_bits}
        return self.workers[0].state() | momentum | residuals


WAYS = [
    pytest.param(2, 1, False, id="2 ranks"),
    pytest.param(4, 1, False, id="4 ranks"),
    pytest.param(4, 2, False, id="fragments"),
    pytest.param(2, 3, True, id="fragments in 16 bits"),
    pytest.param(4, 1, True, id="16 bits"),
]


@pytest.mark.parametrize(("size", "fragments", "in_16_bits"), WAYS)
def test_ranks_have_what_workers_in_numpy_have_also_resumed(
    size: int, fragments: int, in_16_bits: bool
) -> None:
    """The sync point after step 10 comes in the middle of local steps."""
    words = (*OUTER, f"comm.fragments={fragments}", *["comm.differences=int16"] * in_16_bits)
    simulation = Simulation(size, fragments, in_16_bits=in_16_bits)
    simulation.train(range(16), (8, 10, 16))
    straight = train(size, words, 16, (8, 10, 16))
    expected = simulation.state()
    check_equal(straight.state, expected)
    assert expected.keys() <= straight.state.keys()
    assert not in_16_bits or np.abs(expected["s.fc1.weight@residual"]).max() > 1e-7
    half = train(size, words, 10, (8, 10))
    resumed = train(size, words, 6, (16,), half, first_step=10)
    assert resumed.notes == []
    for name, array in straight.state.items():
        np.testing.assert_array_equal(resumed.state[name], array, err_msg=name)


def test_an_outer_rate_of_one_without_momentum_is_the_mean_of_local_steps() -> None:
    """Each of two fragments is exchanged at both sync points."""
    local = train(2, (*OUTER[:2], "comm.outer_lr=1"), 4, (2, 4))
    fragments = train(2, (*OUTER[:2], "comm.fragments=2"), 4, (2, 4))
    check_equal(fragments.state, local.state)
    assert "between averages" in local.summary and "outer lr 1, momentum 0" in fragments.summary


def test_outer_steps_begin_at_local_from() -> None:
    """After three steps with a common gradient."""
    simulation = Simulation(2, 1, in_16_bits=True)
    simulation.train_together(range(3))
    simulation.train(range(3, 9), (9,))
    words = (*OUTER, "comm.differences=int16", "comm.local_from=3steps")
    found = train(2, words, 9, (9,), together=3)
    check_equal(found.state, simulation.state())
    assert "from 3 steps on 4 local steps between outer steps" in found.summary


@pytest.mark.skipif(not FULL, reason="the tests above compute with ranks that are threads")
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("horovod", marks=[needs_mpirun, needs_horovod]),
        pytest.param("torchdist", marks=needs_mpirun),
    ],
)
def test_two_ranks_have_the_same_bits_on_every_engine(engine: str) -> None:
    """Integers are summed exactly, and so are two numbers in any order."""
    words = (
        "model.name=mlp model.widths=[24,16] optim.base_lr=0.05 max_steps=24 log.every_steps=8 "
        "comm.local_steps=8 comm.outer_momentum=0.9 comm.fragments=2 comm.differences=int16"
    )
    expected = on_ranks("mpi", 2, "invariance:curve", words)[0]
    assert on_ranks(engine, 2, "invariance:curve", words)[0] == expected
    assert expected["digests"] == 1


def test_the_residuals_of_other_ranks_are_divided_and_the_header_says_it() -> None:
    words = (*OUTER, "comm.differences=int16")
    half = train(4, words, 8, (8,))
    resumed = train(2, words, 0, (), half)
    for name in NAMES:
        share = half.state[f"s.{name}@residual"].sum(axis=0) / 2
        np.testing.assert_allclose(resumed.state[f"s.{name}@residual"], [share, share], rtol=1e-12)
    assert resumed.notes == [
        "the checkpoint has s.fc1.weight@residual and 5 more of 4 ranks; each of the 2 ranks "
        "starts with an equal share of their sum"
    ]
    alone = train(1, words, 4, (12,), half, first_step=8)
    assert alone.state["s.head.bias@residual"].shape == (1, 3)
    assert alone.notes[0].endswith(" 5 more of 4 ranks; this rank starts with their sum")


def test_a_state_without_the_outer_momentum_is_another_job() -> None:
    plain = train(2, OUTER[:2], 4, (4,))
    with pytest.raises(UserError) as caught:
        train(2, OUTER, 0, (), plain)
    assert caught.value.what == "the state lacks s.fc1.bias@outer_momentum and 5 more"


def test_the_outer_optimizer_is_torchs_sgd_with_nesterov() -> None:
    generator = torch.Generator().manual_seed(3)
    theirs = torch.nn.Parameter(torch.randn(5, generator=generator, dtype=torch.float64))
    own = theirs.detach().clone()
    momentum = torch.zeros_like(own)
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(4):
        gradient = torch.randn(5, generator=generator, dtype=torch.float64)
        theirs.grad = gradient.clone()
        optimizer.step()
        OuterOptimizer(0.7, 0.9).step(own, gradient, momentum)
    torch.testing.assert_close(own, theirs.detach(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_packed_integers_are_summed_exactly(count: int) -> None:
    largest = torch.full((count,), 32767 // 3, dtype=torch.int32)
    signs = torch.tensor([1, -1, -1, 1, 1, -1, 0], dtype=torch.int32)[:count]
    each = [largest * signs, -largest, largest * signs - 2 * signs]
    packed = sum(pack(one) for one in each)
    assert isinstance(packed, torch.Tensor) and len(packed) == (count + 1) // 2
    assert unpack(packed, count).tolist() == sum(each).tolist()  # type: ignore[union-attr]


class _OneRank:
    size = 1
    features = frozenset[str]()

    def allreduce(self, x: torch.Tensor, name: str, op: str = "sum") -> torch.Tensor:
        return x


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_not_lost(wrong: float) -> None:
    values = [torch.tensor([1.0, 2.0, wrong]), torch.tensor([0.25]), torch.zeros(2), torch.zeros(0)]
    residuals = [torch.zeros_like(value) for value in values]
    bad, good, zero, none = sum_in_int16(_OneRank(), values, residuals, "sum")  # type: ignore[arg-type]
    assert not bad.isfinite().any() and good.tolist() == [0.25] and zero.tolist() == [0, 0]
    assert not none.numel()  # of a parameter without elements


def test_layers_are_blocks_of_a_list_or_modules() -> None:
    names = ["fc1.weight", "fc1.bias", "blocks.0.norm.weight", "blocks.0.fc.0.weight", "scale"]
    assert [layer_of(name) for name in names] == ["fc1", "fc1", "blocks.0", "blocks.0", ""]
    layers = [[torch.nn.Parameter(torch.zeros(i))] for i in range(5)]
    found = strided(layers, 2)
    assert [[p.numel() for p in fragment] for fragment in found] == [[0, 2, 4], [1, 3]]


def test_more_fragments_than_layers_are_refused() -> None:
    with pytest.raises(UserError) as caught:
        train(2, ("comm.local_steps=5", "log.every_steps=5", "comm.fragments=4"), 0, ())
    assert caught.value.what == (
        "comm.fragments=4 divides the layers of the model, but only 3 of them are trained"
    )
    assert caught.value.fix == "comm.fragments=3 or fewer"


@pytest.mark.parametrize(
    ("words", "ranks", "what", "key", "fix"),
    [
        (
            "comm.outer_lr=0.7",
            2,
            "comm.outer_lr=0.7 has no effect without comm.local_steps",
            "comm.outer_lr",
            "comm.local_steps=4, or leave comm.outer_lr out",
        ),
        (
            "comm.fragments=8 comm.local_steps=5",
            2,
            "comm.fragments=8 would exchange several fragments in a step of comm.local_steps=5",
            "comm.fragments",
            "comm.fragments=5 or fewer, or more comm.local_steps",
        ),
        (
            "comm.differences=int16 comm.local_steps=5 batch.size=512",
            256,
            "comm.differences=int16 supports 255 ranks, but the job has 256: the sum of more ranks "
            "leaves too few bits to each",
            "comm.differences",
            "comm.differences=none, or fewer ranks",
        ),
    ],
)
def test_what_is_refused(words: str, ranks: int, what: str, key: str, fix: str) -> None:
    found, where, how = refusal_of_job(words, "mpi", ranks)
    assert (found, where.partition(",")[0], how) == (what, key, fix)


@pytest.mark.faults
@pytest.mark.ranks4
@needs_mpirun
def test_three_kills_at_random_moments_do_not_change_the_result(tmp_path: Path) -> None:
    """Of rank 0, of mpirun and of another rank; then the job ends as one that never stopped."""
    words = (
        "model.name=mlp",
        "model.widths=[9,7]",
        "comm.local_steps=5",
        "comm.outer_momentum=0.9",
        "comm.outer_lr=0.7",
        "comm.fragments=2",
        "comm.differences=int16",
    )
    command = Command("mpi", 4, words)
    trials = [kill(command, tmp_path / "run", what) for what in kills(56, command.size, 3)]
    assert len(trials) == 3 and ends_as_straight(command, tmp_path / "run")
