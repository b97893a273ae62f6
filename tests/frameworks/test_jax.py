"""The JAX framework: the numbers of the numpy and torch frameworks, few compilations, and its
state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from ranks import needs_extra

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Batch, digest
from hvdtrain.core.metrics import NOISE_SCALE_KEYS
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.frameworks.jax.learner import largest_micro_batch, rows_for
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

pytestmark = pytest.mark.usefixtures("jax_compilation_cache")

TASK = Classification((5, 4, 2), 3, np.array([0.4, 0.5]), np.array([0.2, 0.3]))
RULES = ["sgd", "adam", "adamw", "lars", "larc", "lamb", "novograd", "muon"]


def learner(*words: str, communicator: Communicator | None = None) -> Learner:
    """Shares of 7 and 8 samples take 8 rows: of a batch of 7 one row is padding."""
    config = configure(
        None, ["framework=jax", "model.name=linear", "speed.precision=fp64", "batch.size=8", *words]
    )
    return build_learner(config, TASK, communicator or SingleProcessCommunicator())


def batch(n: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return {"x": rng.integers(0, 256, (n, *TASK.shape), dtype=np.uint8), "y": rng.integers(0, 3, n)}


def hyper(batch: int, step: int = 0, **numbers: float) -> Hyper:
    return Hyper(
        **{
            "lr": 0.02 * (step + 1),
            "momentum": 0.9,
            "weight_decay": 0.01,
            "batch": batch,
            "step": step,
        }
        | numbers
    )


def floats(sums: dict) -> dict[str, float]:
    return {name: float(value) for name, value in sums.items()}


def move_alike(a: Learner, b: Learner, weighted: bool = False) -> None:
    """20 steps with a changing rate, from a's state."""
    b.load(a.state())
    before = digest(a.state())
    for step in range(20):
        data = batch(7, step) | ({"w": np.linspace(0.2, 1.8, 7)} if weighted else {})
        sums = [floats(one.step([one.to_device(data)], hyper(7, step), step)) for one in (a, b)]
        assert sums[0] == pytest.approx(sums[1], rel=1e-12)
    assert floats(a.evaluate(a.to_device(batch(9)))) == pytest.approx(
        floats(b.evaluate(b.to_device(batch(9)))), rel=1e-12
    )
    states = a.state(), b.state()
    assert states[0].keys() == states[1].keys()
    assert digest(states[0]) != before
    for name, array in states[0].items():
        assert array.dtype == states[1][name].dtype == np.float64
        np.testing.assert_allclose(array, states[1][name], rtol=1e-11, atol=1e-13, err_msg=name)
    a.load(states[1])
    assert digest(a.state()) == digest(states[1])


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """What XLA has compiled since the test began, an event for each; without the cache that other
    tests share."""
    cache = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    seen: list[str] = []

    def listen(event: str, seconds: float, **more: Any) -> None:
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)
    jax.config.update("jax_compilation_cache_dir", cache)
    compilation_cache.reset_cache()


@pytest.mark.in_turn
@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
@pytest.mark.parametrize(
    "words",
    [
        "",
        "model.label_smoothing=0.2",
        "optim.clip_norm=0.3 optim.clip_value=0.05",
        "optim.exclude=none",
    ],
)
def test_jax_and_numpy_move_alike(loss: str, words: str) -> None:
    both = [
        learner(f"framework={framework}", f"model.loss={loss}", *words.split())
        for framework in ("numpy", "jax")
    ]
    move_alike(*both, weighted=not words)


@pytest.mark.in_turn
@pytest.mark.parametrize("rule", RULES)
def test_jax_and_torch_move_an_mlp_alike(rule: str) -> None:
    words = ["model.name=mlp", "model.widths=[6,5]", f"optim.name={rule}"]
    move_alike(learner(*words, "framework=torch"), learner(*words))


def test_jax_and_torch_move_a_convnet_alike() -> None:
    words = [
        "model.name=convnet",
        "model.widths=[4,6]",
        "model.norm=false",
        "optim.name=lars",
        "optim.trust=0.1",
    ]
    move_alike(learner(*words, "framework=torch"), learner(*words))


def test_single_precision_follows_double() -> None:
    words = ["model.name=mlp", "model.widths=[6]", "optim.name=adam"]
    double, single = learner(*words), learner(*words, "speed.precision=fp32")
    single.load(double.state())
    before = double.state()["p.fc1.weight"]
    for step in range(3):
        sums = [
            one.step([one.to_device(batch(7, step))], hyper(7, step), step)
            for one in (double, single)
        ]
        assert floats(sums[0]) == pytest.approx(floats(sums[1]), rel=1e-4)
        assert sums[1]["loss"].dtype == np.float32 and isinstance(sums[1]["loss"], jax.Array), (
            "no wait for the device"
        )
        assert sums[0]["loss"] + 0.0 == float(sums[0]["loss"]), (
            "float64 for those who add sums outside of the framework"
        )
        if step == 0:  # a correction 1 - beta^t in float32 would be off by 2e-5
            moved = [(one.state()["p.fc1.weight"] - before) for one in (double, single)]
            assert np.median(np.abs(moved[1] / moved[0] - 1)) < 5e-6
    assert {array.dtype for array in single.state().values()} == {np.dtype(np.float32)}
    for name, array in double.state().items():
        np.testing.assert_allclose(single.state()[name], array, rtol=2e-5, atol=1e-6, err_msg=name)
    assert jnp.ones(1).dtype == np.float32, "float64 has leaked out of the framework"


def test_weights_start_as_torch_starts_them_and_differ_by_seed() -> None:
    a, b, c = (
        learner("model.name=convnet", "model.norm=false", *seed).state()
        for seed in ((), (), ("seed=2",))
    )
    assert digest(a) == digest(b) != digest(c)
    for name, fan_in in {"conv1": 18, "conv2": 144, "fc": 64}.items():
        bound = fan_in**-0.5
        assert 0.9 * bound < np.abs(a[f"p.{name}.weight"]).max() <= bound
        assert 0.4 * bound < np.abs(a[f"p.{name}.bias"]).max() <= bound


def test_micro_batches_and_empty_ones_change_nothing() -> None:
    words = ["model.name=mlp", "model.widths=[5]"]
    whole, pieces = learner(*words), learner(*words)
    for step in range(3):
        data = batch(9, step)
        cuts = [{"x": data["x"][a:b], "y": data["y"][a:b]} for a, b in ((0, 7), (7, 7), (7, 9))]
        a = floats(whole.step([whole.to_device(data)], hyper(9), 0))
        b = floats(pieces.step([pieces.to_device(cut) for cut in cuts], hyper(9), 0))
        assert a == pytest.approx(b, rel=1e-12)
        assert a["count"] == 9
    for name, array in whole.state().items():
        np.testing.assert_allclose(pieces.state()[name], array, rtol=1e-12, atol=1e-15)
    before = pieces.state()
    sums = pieces.step(
        [pieces.to_device(batch(0))], Hyper(lr=0.5, momentum=0.0, weight_decay=0.1, batch=4), 0
    )
    assert floats(pieces.evaluate(pieces.to_device(batch(0)))) == {
        "loss": 0.0,
        "right": 0.0,
        "count": 0,
    }
    assert sums == {"loss": 0.0, "right": 0.0, "count": 0, "nonfinite": 0.0}
    for name, array in pieces.state().items():
        if name.startswith("p."):
            np.testing.assert_allclose(
                array, before[name] * (0.95 if "weight" in name else 1), rtol=1e-12
            )


def test_noise_is_normal_and_the_same_for_the_same_seed() -> None:
    one, two, three = (learner("model.name=mlp", "model.widths=[500]") for _ in range(3))
    before = one.state()
    for each, seed in ((one, 7), (two, 7), (three, 7 + 2**40)):
        each.step(
            [each.to_device(batch(0))],
            Hyper(lr=1.0, momentum=0.0, weight_decay=0.0, batch=4, noise=0.25),
            seed,
        )
    assert digest(one.state()) == digest(two.state()) != digest(three.state())
    noise = (one.state()["p.fc1.weight"] - before["p.fc1.weight"]).ravel()  # 20,000 numbers
    assert abs(noise.mean()) < 5 * 0.5 / 20000**0.5
    assert noise.std() == pytest.approx(0.5, rel=5 / 40000**0.5)
    assert (
        np.corrcoef(
            noise[:1500], one.state()["p.head.weight"].ravel() - before["p.head.weight"].ravel()
        )[0, 1]
        < 0.15
    )


class Pair(SingleProcessCommunicator):
    """Rank 0 of two: the other rank's gradient is known."""

    size = 2

    def __init__(self, other: np.ndarray) -> None:
        self.other = other
        self.names = list[str]()

    def allreduce(self, x: Any, name: str, op: Any = "sum") -> Any:
        assert isinstance(x, np.ndarray) and x.flags.c_contiguous
        self.names.append(name)
        return x + self.other


@needs_extra("noise_scale")
def test_two_ranks_sum_their_gradients_and_measure_the_noise_scale() -> None:
    other = np.linspace(-0.5, 1.0, 3 * 40 + 3)
    pair = Pair(other)
    one = learner("log.noise_scale=true", communicator=pair)
    alone = learner()
    data = batch(4)
    # the other rank has 6 samples
    straight = Hyper(lr=1.0, momentum=0.0, weight_decay=0.0, batch=10)
    sums = floats(one.step([one.to_device(data)], straight, 0))
    alone.step([alone.to_device(data)], straight, 0)
    own, whole = (
        -np.concatenate([x.state()["p.fc.bias"], x.state()["p.fc.weight"].ravel()])
        for x in (alone, one)
    )
    np.testing.assert_allclose(whole, own + other, rtol=1e-12)
    assert pair.names == ["gradient.0"]
    excess = (own * 10 / 4) @ (own * 10 / 4) - whole @ whole
    expected = {
        "excess": excess,
        "excess_inv": 1 / 4 - 1 / 10,
        "big": whole @ whole / 2,
        "big_inv": 1 / 20,
        "steps": 1 / 2,
    }
    assert {key: sums[key] for key in NOISE_SCALE_KEYS} == pytest.approx(expected, rel=1e-12)


def test_few_shapes_are_compiled(compilations: list[str]) -> None:
    one = learner("batch.size=32", "batch.micro=16")
    one.step([one.to_device(batch(16)), one.to_device(batch(15))], hyper(31), 0)
    one.evaluate(one.to_device(batch(50)))
    one.state()
    first = len(compilations)
    assert 3 <= first <= 16, "gradient, update, sums, and single operations"
    for step, sizes in enumerate([(15, 16), (16, 14), (0, 16), (0, 0), (14, 0)]):
        one.step(
            [one.to_device(batch(n)) for n in sizes],
            hyper(sum(sizes) or 1, step, momentum=0.1 * step, weight_decay=0.1),
            step,
        )
        one.evaluate(one.to_device(batch(49)))
    assert len(compilations) == first, (
        "other shares, another batch, another rate: nothing is compiled again"
    )
    one.step([one.to_device(batch(16))], hyper(16, noise=0.1), 0)
    assert 0 < len(compilations) - first < 4, "the noise, once"


def test_rows_are_few_and_follow_from_the_share_alone() -> None:
    assert [
        largest_micro_batch(31, None, 2),
        largest_micro_batch(31, 3, 2),
        largest_micro_batch(64, 64, 1),
        largest_micro_batch(1, 5, 4),
    ] == [16, 3, 64, 1]
    assert [rows_for(n, 16) for n in (1, 13, 14, 16, 17, 31, 33, 500, 512, 513)] == [
        1,
        13,
        16,
        16,
        18,
        32,
        36,
        512,
        512,
        576,
    ]
    assert rows_for(100, 100) == rows_for(88, 100) == 100
    assert len({rows_for(n, 100) for n in range(1024, 4097)}) == 17  # 8 in each doubling
    assert all(n <= rows_for(n, 100) <= n * 9 / 8 + 1 for n in range(1, 5000) if not 88 <= n <= 100)


def test_state_loads_into_another_learner_which_continues_equally() -> None:
    a = learner("model.name=mlp", "optim.name=lamb")
    b = learner("model.name=mlp", "optim.name=lamb", "seed=2")
    a.step([a.to_device(batch(8))], hyper(8), 0)
    state = a.state()
    b.load(state)
    given = digest(state)
    for one in (a, b):
        one.step([one.to_device(batch(8, 9))], hyper(8, 1), 9)
    assert digest(a.state()) == digest(b.state()) != digest(state) == given
    with pytest.raises(UserError, match=r"p\.fc1\.bias has shape \(6,\), the model has \(128,\)"):
        a.load(learner("model.name=mlp", "optim.name=lamb", "model.widths=[6]").state())
    with pytest.raises(UserError, match=r"the state lacks p\.fc1\.bias and 11 more"):
        a.load({})
