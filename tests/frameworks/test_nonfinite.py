"""Steps whose loss or gradient is not finite: counted on every rank, and without effect with
guard.nonfinite=skip."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from nonfinite_on_ranks import SHARDED, TASK, AllKinds, Net, batch, hyper, same
from nonfinite_on_ranks import learner as learner_on
from pool import on_ranks
from torch import nn
from torch.nn import Parameter

from hvdtrain.comm.communicator import (
    Buffer,
    CompletedHandle,
    Handle,
    Op,
    SingleProcessCommunicator,
)
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Batch, digest, whole_arrays
from hvdtrain.core.metrics import NOISE_SCALE_KEYS, Sums
from hvdtrain.frameworks.learner import Learner
from hvdtrain.frameworks.torch.buffers import Buffers
from hvdtrain.frameworks.torch.step import any_nonfinite, one_or_nan, zero_where
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

pytestmark = pytest.mark.usefixtures("jax_compilation_cache")
learner = functools.partial(learner_on, SingleProcessCommunicator())
FRAMEWORKS = ["torch", "numpy", "jax"]


class Twice(SingleProcessCommunicator):
    """Two equal ranks: every sum doubles. Records the names of collectives."""

    name = "twice"
    size = 2

    def __init__(self) -> None:
        self.names: list[str] = []

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        self.names.append(name)
        return x * 2

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        return CompletedHandle(self.allreduce(x, name, op))

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        self.names.append(name)
        return x


def floats(sums: Sums) -> dict[str, float]:
    return {name: float(value) for name, value in sums.items()}


def weighted(n: int, seed: int, weight: float) -> Batch:
    """The second sample has this weight."""
    return batch(n, seed) | {"w": np.where(np.arange(n) == 1, weight, 1.0)}


# Each dtype, place, and layout; vectorized kernels take the last few numbers by another path.
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_nonfinite_number_is_found_and_a_huge_one_is_finite(
    dtype: torch.dtype, device: str
) -> None:
    huge = 1e30 if dtype == torch.float32 else 1e200  # their squares overflow
    for shape, bad in itertools.product(
        [(1,), (7,), (9,), (3, 5, 2, 2), (100, 331)], [math.nan, math.inf, -math.inf]
    ):
        for last in (
            (torch.contiguous_format, torch.channels_last)
            if len(shape) == 4
            else (torch.contiguous_format,)
        ):
            some = [
                Parameter(torch.zeros(s, dtype=dtype, device=device))
                for s in ((4,), (0, 3), shape, ())
            ]
            for p in some:
                p.grad = torch.full_like(p, -huge)
            some[2].grad = some[2].grad.to(memory_format=last)
            assert not any_nonfinite(some)
            for at in {0, some[2].numel() // 2, some[2].numel() - 1}:
                some[2].grad = torch.full(shape, huge, dtype=dtype, device=device)
                some[2].grad.view(-1)[at] = bad
                some[2].grad = some[2].grad.to(memory_format=last)
                assert any_nonfinite(some), (shape, bad, at)


def test_gradients_of_no_number_and_sparse_ones() -> None:
    empty = Parameter(torch.zeros(0, 3))
    empty.grad = torch.zeros(0, 3)
    assert not any_nonfinite([empty]) and not any_nonfinite([Parameter(torch.zeros(2))])
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1, 1, 4])).sum().backward()
    assert table.weight.grad.is_sparse and not any_nonfinite([table.weight])
    table.weight.grad._values()[2, 1] = math.nan
    assert any_nonfinite([table.weight])


def test_nothing_waits_for_the_device() -> None:
    """A meta tensor has no number that a host could look at: whoever does raises."""
    p = Parameter(torch.zeros(3, device="meta"))
    p.grad = torch.zeros(3, device="meta")
    bad = any_nonfinite([p])
    kept = zero_where(
        bad, {"big": torch.zeros((), dtype=torch.float64, device="meta"), "steps": 0.5}
    )
    assert {value.device.type for value in (bad, *kept.values(), one_or_nan(p.sum()))} == {"meta"}
    assert {value.dtype for value in kept.values()} == {torch.float64}


BADLY = {  # a learner's words, and a bad batch for it
    "torch, inf": (["model.name=nonfinite_on_ranks:Net"], math.inf),
    "torch, nan": (
        [
            "model.name=nonfinite_on_ranks:Net",
            "optim.name=torch.optim.RMSprop",
            "optim.momentum=0.5",
        ],
        math.nan,
    ),
    "torch, its logits": (
        ["model.name=nonfinite_on_ranks:Net", "model.bad_pass=3", "optim.name=lamb"],
        1.0,
    ),
    "torch, Adam counts": (
        ["model.name=nonfinite_on_ranks:Net", "optim.name=torch.optim.Adam"],
        -math.inf,
    ),
    "torch, buckets": (
        ["model.name=wide_resnet", "model.widths=[4,4,4,4]", "comm.reduce=bucket"],
        math.inf,
    ),
    "torch, ghosts": (
        ["model.name=wide_resnet", "model.widths=[4,4,4,4]", "norm.kind=ghost", "norm.ghost=2"],
        math.nan,
    ),
    "numpy, inf": (["framework=numpy", "model.name=linear"], math.inf),
    "numpy, nan": (["framework=numpy", "model.name=linear", "optim.name=adam"], math.nan),
    "jax, inf": (["framework=jax", "model.name=convnet", "model.widths=[3]"], math.inf),
    "jax, nan": (
        ["framework=jax", "model.name=mlp", "model.widths=[5]", "optim.name=lamb"],
        math.nan,
    ),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("case", BADLY)
def test_a_skipped_step_is_as_if_it_had_not_been(case: str) -> None:
    words, weight = BADLY[case]
    if not ranks.of_this_copy([" ".join(words)]):
        pytest.skip("this copy lacks an extra of the job")
    one, straight = (
        learner(*words),
        learner(*words, *(["model.bad_pass=0"] if "model.bad_pass=3" in words else [])),
    )
    counts = []
    for step in range(5):
        data = weighted(6, step, weight) if step == 2 else batch(6, step)
        before = one.state()
        sums = floats(one.step([one.to_device(data)], hyper(6, step), step))
        counts.append(sums["nonfinite"])
        assert sums["count"] == 6
        if step != 2:
            assert not same(before, one.state())
            straight.step([straight.to_device(data)], hyper(6, step), step)
        assert same(one.state(), straight.state() if step != 2 else before), step
    assert counts == [0.0, 0.0, 1.0, 0.0, 0.0]
    buffers = {name.rpartition(".")[2] for name in one.state() if name.startswith("b.")}
    assert {
        "running_mean",
        "num_batches_tracked",
        "seen",
        "odd",
        "largest",
    } <= buffers or "Net" not in words[0]


def test_the_first_step_and_a_buffer_in_another_tensor() -> None:
    """Nothing of a torch class's own state appears, and the model's buffers are the tensors that
    they were."""
    one = learner(
        "model.name=nonfinite_on_ranks:Net", "model.bad_pass=1", "optim.name=torch.optim.RMSprop"
    )
    before = one.state()
    there = dict(one.model.named_buffers())
    one.step([one.to_device(batch(6, 0))], hyper(6, 0), 0)
    assert same(one.state(), before) and not any(name.startswith("s.") for name in before)
    assert all(b is there[name] for name, b in one.model.named_buffers())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_without_skip_a_bad_step_is_counted_and_stays(framework: str) -> None:
    one = learner(f"framework={framework}", "model.name=linear", "guard.nonfinite=stop")
    counts = []
    for step in range(3):
        data = weighted(6, step, math.inf) if step == 1 else batch(6, step)
        counts.append(float(one.step([one.to_device(data)], hyper(6, step), step)["nonfinite"]))
    assert counts == [0.0, 1.0, 1.0], "the weights are no numbers any more"
    assert not np.isfinite(one.state()["p.fc.weight"]).all()


@pytest.mark.parametrize("reduce", ["auto", "bucket"])
@pytest.mark.parametrize("bad_pass", [1, 2])
def test_one_bad_micro_batch_spoils_the_step(bad_pass: int, reduce: str) -> None:
    one = learner(
        "model.name=nonfinite_on_ranks:Net", f"model.bad_pass={bad_pass}", f"comm.reduce={reduce}"
    )
    before = one.state()
    for expected in (1.0, 0.0):
        sums = floats(one.step([one.to_device(batch(n, n)) for n in (4, 0, 5)], hyper(9, 0), 0))
        assert (sums["nonfinite"], sums["count"]) == (expected, 9)
        assert same(one.state(), before) == (expected == 1)
    for framework in ("numpy", "jax"):
        other = learner(f"framework={framework}", "model.name=linear")
        before = other.state()
        sums = floats(
            other.step(
                [other.to_device(d) for d in (weighted(4, 0, math.nan), batch(0, 0), batch(5, 1))],
                hyper(9, 0),
                0,
            )
        )
        assert (sums["nonfinite"], sums["count"]) == (1.0, 9) and same(other.state(), before)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_empty_share_is_finite(framework: str) -> None:
    one = learner(f"framework={framework}", "model.name=linear")
    assert floats(one.step([one.to_device(batch(0, 0))], hyper(6, 0), 0)) == {
        "loss": 0.0,
        "right": 0.0,
        "count": 0,
        "nonfinite": 0.0,
    }


def single(framework: str, *words: str, std: float = 0.25) -> Learner:
    config = configure(
        None,
        [
            f"framework={framework}",
            "model.name=linear",
            "batch.size=2",
            "guard.nonfinite=skip",
            *words,
        ],
    )
    return build_learner(
        config,
        Classification((2, 2, 1), 3, np.array([0.4]), np.array([std])),
        SingleProcessCommunicator(),
    )


def two(weight: float) -> Batch:
    """One image twice, so that nothing huge cancels."""
    x = np.array([[0, 255, 10, 200]] * 2, np.uint8).reshape(2, 2, 2, 1)
    return {"x": x, "y": np.zeros(2, np.int64), "w": np.full(2, weight)}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_loss_beyond_all_numbers_counts_though_its_gradient_is_finite(framework: str) -> None:
    """Logits of 1e30: half the square is beyond float32, and the gradient is 1e30."""
    one = single(framework, "model.loss=squared_error")
    one.load(one.state() | {"p.fc.bias": np.full(3, 1e30, np.float32)})
    before = one.state()
    sums = floats(one.step([one.to_device(two(1.0))], hyper(2, 0), 0))
    assert (sums["loss"], sums["nonfinite"]) == (math.inf, 1.0) and same(one.state(), before)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_so_does_a_weighted_loss(framework: str) -> None:
    """2 x ln 3 x 3e38, where float32 ends at 3.4e38; numpy computes it in float64."""
    one = single(framework, std=1.0)
    before = one.state()
    sums = floats(one.step([one.to_device(two(3e38))], hyper(2, 0), 0))
    assert sums["loss"] == pytest.approx(2 * math.log(3)) and sums["nonfinite"] == 1.0
    assert same(one.state(), before)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_weight_of_zero_hides_no_infinite_loss(framework: str) -> None:
    one = single(framework, "model.loss=squared_error")
    one.load(one.state() | {"p.fc.bias": np.full(3, 1e30, np.float32)})
    assert float(one.step([one.to_device(two(0.0))], hyper(2, 0), 0)["nonfinite"]) == 1.0


@pytest.mark.parametrize("words", [[], ["optim.clip_norm=1"]])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_huge_gradients_are_finite(framework: str, words: list[str]) -> None:
    """Numbers around 1e30, whose norm is beyond float32; clipped by that norm they are 0, and the
    weights only decay."""
    one = single(framework, *words)
    one.load(one.state() | {"p.fc.weight": np.full((3, 4), 1e3, np.float32)})
    before = one.state()
    sums = floats(
        one.step([one.to_device(two(1e30))], hyper(2, 0, lr=1e-30 if not words else 0.5), 0)
    )
    assert sums["nonfinite"] == 0.0
    assert not same(one.state(), before) and all(
        np.isfinite(array).all() for array in one.state().values()
    )


@pytest.mark.parametrize("words", [["optim.clip_value=0.1"], []])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_clipping_does_not_hide_nonfinite_gradients(framework: str, words: list[str]) -> None:
    """Losses of ln 3 x 1e38, which float32 holds; gradients of a thousand times that, which a clip
    by value would make 0.1."""
    one = single(framework, *words, std=1e-3)
    before = one.state()
    sums = floats(one.step([one.to_device(two(1e38))], hyper(2, 0), 0))
    assert sums["loss"] == pytest.approx(2 * math.log(3)) and sums["nonfinite"] == 1.0
    assert same(one.state(), before)


@ranks.needs_extra("noise_scale")
@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_nonfinite_step_adds_nothing_to_the_noise_scale(framework: str, policy: str) -> None:
    """Of two ranks each says half of a step: nonfinite and steps are 1/2."""
    words = [
        "model.name=mlp",
        "log.noise_scale=true",
        f"guard.nonfinite={policy}",
        f"framework={framework}",
    ]
    one = learner_on(Twice(), *words)
    good = floats(one.step([one.to_device(batch(6, 0))], hyper(12, 0), 0))
    assert (
        good["nonfinite"] == 0.0
        and good["steps"] == 0.5
        and good["excess_inv"] == pytest.approx(1 / 6 - 1 / 12)
    )
    assert (
        min(good[key] for key in NOISE_SCALE_KEYS if key != "excess") > 0
        and abs(good["excess"]) < 1e-12 < good["big"]
    )
    bad = floats(one.step([one.to_device(weighted(6, 1, math.inf))], hyper(12, 1), 1))
    assert {key: bad[key] for key in ("nonfinite", "count", *NOISE_SCALE_KEYS)} == {
        "nonfinite": 0.5,
        "count": 6,
    } | dict.fromkeys(NOISE_SCALE_KEYS, 0.0)


@pytest.mark.parametrize(
    "words",
    [
        ["model.name=nonfinite_on_ranks:Net", "optim.name=lamb"],
        ["model.name=mlp", "optim.name=torch.optim.Adam"],
        ["framework=numpy", "model.name=linear"],
        ["framework=jax", "model.name=mlp"],
    ],
)
def test_views_are_the_state_without_a_copy(words: list[str]) -> None:
    one = learner(*words)
    one.step([one.to_device(batch(6, 0))], hyper(6, 0), 0)
    state = one.state()
    views = dict(whole_arrays(one.pieces()))
    assert list(state) == list(views) and digest(state) == digest(views)
    again = dict(whole_arrays(one.pieces()))
    own = [name for name in views if name.endswith((".weight", ".running_var", ".exp_avg", ".0"))]
    assert len(own) >= 2
    for name in own:
        assert np.shares_memory(views[name], again[name]) and not np.shares_memory(
            views[name], state[name]
        ), name
    del views, again
    one.step([one.to_device(batch(6, 1))], hyper(6, 1), 1)
    assert not same(state, one.state())
    fresh = learner(*words)
    fresh.load(state)
    assert same(state, fresh.state())


def test_views_of_a_strided_tensor() -> None:
    one = learner("model.name=nonfinite_on_ranks:Net")
    one.model.to(memory_format=torch.channels_last)
    views = dict(whole_arrays(one.pieces()))
    assert not views["p.conv.weight"].flags.c_contiguous and same(views, one.state())
    assert same(views, learner("model.name=nonfinite_on_ranks:Net").state())


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Net(TASK.shape, 3), ["settle", "settle.others"]),
        (nn.Linear(2, 3), []),
        (nn.BatchNorm1d(2), ["settle", "settle.others"]),
        (AllKinds(0), ["settle", "settle.others"]),
    ],
)
def test_buffers_settle_in_two_collectives(model: nn.Module, names: list[str]) -> None:
    communicator = Twice()
    before = [b.clone() for b in model.buffers()]
    Buffers(model, torch.device("cpu")).sync_buffers(communicator)
    assert communicator.names == names
    assert all(torch.equal(b, c) for b, c in zip(model.buffers(), before, strict=True)), (
        "the mean of two equal ranks"
    )
    communicator.names = []
    communicator.size = 1
    Buffers(model, torch.device("cpu")).sync_buffers(communicator)
    assert communicator.names == []


@functools.cache
def found(engine: str) -> dict[str, list[dict[str, Any]]]:
    """{case: [what each of two ranks found]}."""
    everyone = on_ranks(engine, 2, "nonfinite_on_ranks:by_case", engine)
    return {case: [one[case] for one in everyone] for case in everyone[0]}


SKIPPED = [
    "torch",
    "torch, two passes",
    *("torch, sync norm" for _ in ranks.of_this_copy(["norm.kind=sync"])),
    "torch, RMSprop",
    "torch, small buckets",
    "numpy",
    "jax",
]
MARKS = [*ranks.ENGINES[1].marks, pytest.mark.slow]  # one engine is enough in the fast tests
ENGINES = [ranks.ENGINES[0], pytest.param("horovod", marks=MARKS)]
ON_MPI = [pytest.param("mpi", case, marks=ranks.ENGINES[0].marks) for case in [*SKIPPED, *SHARDED]]
ON_HOROVOD = [pytest.param("horovod", case, marks=MARKS) for case in SKIPPED]


@pytest.mark.parametrize(("engine", "case"), ON_MPI + ON_HOROVOD)
def test_a_loss_of_one_rank_makes_all_ranks_skip(engine: str, case: str) -> None:
    each = found(engine)[case]
    assert [one["nonfinite"] for one in each] == [[0.0, 0.5, 0.0]] * 2
    assert [one["kept"] for one in each] == [True, True], (
        "the second step changed something, or another one nothing"
    )
    assert [one["as if it had not been"] for one in each] == [True, True]
    assert (
        each[0]["learned"] == each[1]["learned"]
        and each[0]["synchronized"] == each[1]["synchronized"]
    )
    distributed = engine == "horovod" and case.startswith("torch") and "buckets" not in case
    assert ("hvd.DistributedOptimizer" in each[0]["model"]) == distributed, each[0]["model"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_of_one_rank_is_counted_by_all(engine: str) -> None:
    assert [one["nonfinite"] for one in found(engine)["stop"]] == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_buffers_of_every_kind_settle(engine: str) -> None:
    assert [one["wrong"] for one in found(engine)["synchronized"]] == [[], []]
