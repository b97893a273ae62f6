"""16-bit number types in layers: what is computed, what is refused, and the loss scale of fp16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from host_reads import HostReads, NoReading
from ranks import needs_extra

from hvdtrain.comm.communicator import (
    Buffer,
    CompletedHandle,
    Handle,
    Op,
    SingleProcessCommunicator,
)
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Batch
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch import precision
from hvdtrain.frameworks.torch.precision import (
    FIRST_SCALE,
    GROW_AFTER,
    LossScale,
    is_built_for_bf16,
)
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner
from hvdtrain.training.telemetry.loss_scale import LossScaleGauge

CPU = torch.device("cpu")
TASK = Classification((16, 16, 2), 3, np.array([0.4, 0.5]), np.array([0.2, 0.3]))


def batch(n: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.integers(0, 256, (n, *TASK.shape), dtype=np.uint8),
        "y": rng.integers(0, TASK.classes, n),
    }


class Two(SingleProcessCommunicator):
    """Two ranks with the same samples: every sum doubles."""

    name = "two"
    size = 2
    local_size = 2

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        return x * 2

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        return CompletedHandle(x * 2)

    def allgather_object(self, thing: Any) -> list[Any]:
        return [thing, thing]


def learner(*words: str) -> object:
    config = configure(None, ["batch.size=16", "speed.device=cpu", *words])
    return build_learner(config, TASK, SingleProcessCommunicator())


def hyper(step: int = 0, lr: float = 0.05) -> Hyper:
    return Hyper(lr=lr, momentum=0.9, weight_decay=0.0, batch=16, step=step)


def moved(one: object, steps: int = 1) -> np.ndarray:
    """How far all weights went."""
    before = one.state()
    for step in range(steps):
        one.step([one.to_device(batch(16, step))], hyper(step), step)
    after = one.state()
    return np.concatenate(
        [(after[name] - before[name]).ravel() for name in before if name.startswith("p.")]
    )


@pytest.mark.parametrize(
    "norm",
    ["batch", *(pytest.param(n, marks=needs_extra("batch_norms")) for n in ("ghost", "sync"))],
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_moves_nearly_as_single(precision: str, norm: str) -> None:
    words = ["model.name=convnet", f"norm.kind={norm}", "norm.ghost=8"]
    single, half = (moved(learner(*words, f"speed.precision={p}")) for p in ("fp32", precision))
    apart = np.linalg.norm(single - half) / np.linalg.norm(single)
    assert 1e-6 < apart < (0.2 if precision == "bf16" else 0.05), apart


@needs_extra("batch_norms")
def test_joined_statistics_of_half_precision() -> None:
    """norm.kind=sync in bf16 over two ranks of the same samples is norm.kind=batch on one."""
    config = configure(
        None,
        [
            "batch.size=16",
            "speed.device=cpu",
            "model.name=convnet",
            "norm.kind=sync",
            "speed.precision=bf16",
        ],
    )
    both = build_learner(config, TASK, Two())
    one = learner("model.name=convnet", "speed.precision=bf16")
    steps = [
        x.step([x.to_device(batch(8, 3))], hyper()._replace(batch=count), 0)
        for x, count in ((both, 16), (one, 8))
    ]
    assert abs(float(steps[0]["loss"]) - float(steps[1]["loss"])) < 1e-3 * float(steps[1]["loss"])
    a = both.state()
    b = one.state()
    for name in (name for name in a if name.endswith("running_mean")):
        np.testing.assert_allclose(a[name], b[name], rtol=0.02, atol=2e-3)


def test_weights_and_optimizer_state_stay_single_and_evaluation_is_half_too() -> None:
    one = learner("speed.precision=bf16", "model.name=convnet")
    other = learner("model.name=convnet")
    moved(one)
    assert {
        a.dtype.name for name, a in one.state().items() if not name.endswith("batches_tracked")
    } == {"float32"}
    other.load(one.state())
    losses = [float(x.evaluate(x.to_device(batch(40, 7)))["loss"]) for x in (one, other)]
    assert 0 < abs(losses[0] - losses[1]) < 0.02 * losses[1]
    assert "torch float32 and bfloat16 on cpu" in one.describe()


@pytest.mark.parametrize(("name", "flag"), [("bf16", "avx512_bf16"), ("fp16", "avx512_fp16")])
def test_the_header_says_where_a_cpu_emulates_a_type(
    name: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flags, is_emulated in (
        (frozenset({"avx2"}), True),
        (frozenset({"avx2", flag}), False),
        (frozenset[str](), False),
    ):
        monkeypatch.setattr(precision, "cpu_flags", lambda flags=flags: flags)
        note = (
            f" on cpu ({name} is emulated: this CPU has no instructions for it, and "
            "speed.precision=fp32 is several times faster)"
        )
        assert (
            note in learner(f"speed.precision={name}", "model.name=linear").describe()
        ) is is_emulated
    monkeypatch.setattr(precision, "cpu_flags", lambda: frozenset({"avx2"}))
    assert "emulated" not in learner("model.name=linear").describe()


def test_auto_takes_bf16_where_the_processor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for has, words in (
        (True, "torch float32 and bfloat16"),
        (False, "torch float32: no bf16 unit"),
    ):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=has: has)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert is_built_for_bf16(CPU) is has
        assert words in learner("speed=auto", "model.name=linear").describe()


def test_a_scale_that_overflows_is_halved_and_the_step_left_out() -> None:
    one = learner("speed.precision=fp16", "model.name=mlp")
    one.scale._scale.fill_(2.0**24)  # as after a long time without an overflow
    before = one.state()
    counts = []
    for step in range(30):
        sums = one.step(
            [one.to_device(batch(16, step) | {"w": np.full(16, 2e3)})], hyper(step, lr=1e-6), step
        )
        counts.append(float(sums["nonfinite"]))
        if float(one.scale._scale) < 2.0**24 and "first" not in before:
            before["first"] = np.array(step)
            assert all(
                np.array_equal(before[n], a) for n, a in one.state().items() if n.startswith("p.")
            ), "the first overflow is left out"
    assert counts == [0.0] * 30 and float(one.scale._scale) < 2.0**22
    assert any(
        not np.array_equal(before[n], a) for n, a in one.state().items() if n.startswith("p.")
    ), "later ones are not"


@pytest.mark.parametrize(("words", "reads"), [("", 1), ("guard.nonfinite=skip", 1)])
def test_the_host_waits_once_in_a_step(words: str, reads: int) -> None:
    """Whether the optimizer makes its step."""
    one = learner("speed.precision=fp16", "model.name=mlp", *words.split())
    samples = one.to_device(batch(16, 0))
    with HostReads() as found:
        one.step([samples], hyper(), 0)
    assert found.found == ["aten._local_scalar_dense.default"] * reads


def test_an_overflow_is_a_line_and_an_event() -> None:
    events = []

    class Told:
        def emit(self, kind: str, step: int, **fields: Any) -> None:
            events.append((kind, step, fields))

    one = learner("speed.precision=fp16", "model.name=mlp")
    gauge = LossScaleGauge(one, Told(), 10)
    assert gauge.fields({}, 5) == {"loss_scale": FIRST_SCALE} and not events
    one.scale._scale.fill_(FIRST_SCALE / 2)
    assert gauge.fields({}, 1) == {"loss_scale": FIRST_SCALE / 2}
    one.scale._scale.fill_(FIRST_SCALE / 16)
    gauge.fields({}, 4)
    assert [(kind, step, fields["lines"]) for kind, step, fields in events] == [
        (
            "overflow",
            16,
            [
                "overflow in step 16: gradients of fp16 were too large, and the step was skipped; "
                "loss scale 65536, now 32768"
            ],
        ),
        (
            "overflow",
            20,
            [
                "overflow in steps 17 to 20: gradients of fp16 were too large 3 times, and these "
                "steps were skipped; loss scale 32768, now 4096"
            ],
        ),
    ]
    assert LossScaleGauge(learner("model.name=mlp"), Told(), 0).fields({}, 1) == {}


def test_without_room_to_halve_a_bad_step_counts() -> None:
    one = learner("speed.precision=fp16", "model.name=mlp")
    one.scale._scale.fill_(1.0)
    sums = one.step([one.to_device(batch(16, 0) | {"w": np.full(16, np.inf)})], hyper(), 0)
    assert float(sums["nonfinite"]) == 1.0 and float(one.scale._scale) == 1.0


def test_the_scale_doubles_after_many_good_steps() -> None:
    """The host reads nothing meanwhile: on a GPU it would wait, in each step."""
    scale = LossScale(CPU)
    good = torch.tensor(False)
    bad = torch.tensor(True)
    with NoReading():
        overflowed = [scale.update(good) for _ in range(GROW_AFTER - 1)]
    assert not any(overflowed) and float(scale._scale) == FIRST_SCALE
    scale.update(good)
    assert float(scale._scale) == 2 * FIRST_SCALE
    assert scale.update(bad) and float(scale._scale) == FIRST_SCALE
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.full((2,), FIRST_SCALE)
    scale.unscale_([p])
    assert p.grad.tolist() == [1.0, 1.0]


def test_a_job_continues_in_another_precision() -> None:
    fp16 = learner("speed.precision=fp16", "model.name=mlp")
    fp32 = learner("model.name=mlp")
    fp16.scale._scale.fill_(32.0)
    moved(fp16)
    fp32.load(fp16.state())
    again = learner("speed.precision=fp16", "model.name=mlp")
    again.load(fp16.state())
    assert float(again.scale._scale) == 32.0 and int(again.scale._good) == 1
    again.load(fp32.state())
    assert float(again.scale._scale) == 32.0
    assert precision.NAME not in fp32.state() and precision.NAME in fp16.state()


def test_auto_precision_of_numpy_is_float32() -> None:
    assert (
        learner("framework=numpy", "model.name=linear", "speed.precision=auto")
        .state()["p.fc.weight"]
        .dtype
        == np.float32
    )


def test_a_gradient_that_this_torch_gets_wrong_is_refused() -> None:
    """16x16 -> 8, 4, 2, 1: the fifth convolution strides over 1x1."""
    deep = "model.widths=[4,4,4,4,4]"
    with pytest.raises(UserError, match="conv5 has a stride and gets images of 1x1"):
        learner("speed.precision=bf16", "model.name=convnet", deep)
    learner("model.name=convnet", deep)
    learner("speed.precision=bf16", "model.name=convnet", "model.widths=[4,4,4,4]")


def test_a_compiled_model_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        learner("speed.compile=default", "model.name=linear")


@pytest.mark.parametrize("wanted", [True, False])
def test_images_come_in_the_order_that_is_asked_for(wanted: bool) -> None:
    one = learner(f"speed.channels_last={wanted}".lower(), "model.name=convnet")
    x = one.to_device(batch(3, 0)).arrays["x"]
    assert (
        x.is_contiguous(memory_format=torch.channels_last) is wanted
        and x.is_contiguous() is not wanted
    )


class Flat(torch.nn.Module):
    """As many users' models: view() after a convolution, which takes contiguous numbers alone."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(shape[2], 3, 3, padding=1)
        self.fc = torch.nn.Linear(3 * shape[0] * shape[1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(x).view(len(x), -1))


def test_a_users_model_gets_contiguous_images_of_one_channel_too() -> None:
    config = configure(None, ["model.name=test_precision:Flat", "batch.size=4", "speed.device=cpu"])
    one = build_learner(
        config,
        Classification((8, 8, 1), 3, np.array([0.4]), np.array([0.2])),
        SingleProcessCommunicator(),
    )
    images = np.zeros((4, 8, 8, 1), np.uint8)
    assert (
        float(
            one.step(
                [one.to_device({"x": images, "y": np.zeros(4, np.int64)})],
                hyper()._replace(batch=4),
                0,
            )["count"]
        )
        == 4
    )
