"""A custom loop in JAX: a plain loop of JAX and optax on 1, 2 and 3 ranks, resumed; each call
by hand; the text of each error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax_loop_on_ranks import DATA, OPTIMIZERS, SAMPLES, STEPS, loss_of, main, named, plain, start
from pool import alone
from ranks import mpirun, needs_mpirun

import hvdtrain as ht
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.context.logged import MOST_LATE, Logged
from hvdtrain.errors import Diverged, UserError
from hvdtrain.frameworks.jax.user_loop.extra import from_arrays, to_arrays

pytestmark = pytest.mark.usefixtures("jax_compilation_cache")


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture
def opened() -> Iterator[list[ht.Context]]:
    """Contexts that a test opens; those that it leaves open are closed."""
    contexts: list[ht.Context] = []
    yield contexts
    for ctx in contexts:
        if not ctx._loop.is_closed:
            ctx.close()


@pytest.fixture
def make(opened: list[ht.Context]) -> Any:
    def init(*words: str, optimizer: Any = OPTIMIZERS["sgd"]) -> Any:
        opened.append(ht.init("framework=jax", *words))
        return (opened[-1], *opened[-1].prepare(start(), optimizer))

    return init


def in_ways(folder: Path, size: int, *ways: str) -> list[dict[str, Any]]:
    """What the loop gave in each way, one after the other in one start."""
    out = folder / f"of-{size}.json"
    if size == 1:
        main(str(out), *ways)
    else:
        done = mpirun(
            size,
            alone("jax_loop_on_ranks:main", str(out), *[f"{way} comm.engine=mpi" for way in ways]),
        )
        assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


def assert_near(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Weights, and the losses behind the resume; each rank has drawn by other keys."""
    assert (
        found["weights"].keys() == expected["weights"].keys()
        and len(found["losses"]) == STEPS - found["began"]
    )
    for name, weights in expected["weights"].items():
        np.testing.assert_allclose(
            found["weights"][name], weights, rtol=0, atol=1e-12, err_msg=name
        )
    np.testing.assert_allclose(
        found["losses"], expected["losses"][found["began"] :], rtol=0, atol=1e-12
    )
    keys = [tuple(key) for of_rank in found["keys"] for key in of_rank]
    assert len(set(keys)) == len(keys)


@pytest.mark.in_turn
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_process_computes_what_jax_and_optax_compute(tmp_path: Path, optimizer: str) -> None:
    (found,) = in_ways(tmp_path, 1, f"{optimizer} 7 {STEPS}")
    expected = plain(optimizer, 7)
    assert_near(found, expected)
    assert found.get("counted", 0.0) < 1e-12
    weights = jax.tree.map(jnp.asarray, start())
    leaves = [np.asarray(array) for array in expected["weights"].values()]
    weights = jax.tree.unflatten(jax.tree.structure(weights), leaves)
    assert found["evaluated"] == pytest.approx(
        float(loss_of(weights, tuple(DATA.values()))), abs=1e-12
    )


@pytest.mark.in_turn
@needs_mpirun
def test_ranks_compute_what_one_process_computes_and_go_on_where_others_have_stopped(
    tmp_path: Path,
) -> None:
    """Uneven shares of 7 samples, and of 2 samples on 3 ranks, so that one has none; a run that
    resumes with 2, 3 and 1 ranks."""
    run = f"run={tmp_path / 'run'}"
    expected = plain("adamw", 7)
    of_2 = in_ways(tmp_path, 2, f"adamw 7 {STEPS}", f"adamw 7 4 {run}", f"adamw 7 8 {run}")
    of_3 = in_ways(tmp_path, 3, f"sgd 7 {STEPS}", f"chain 2 {STEPS}", f"adamw 7 10 {run}")
    (of_1,) = in_ways(tmp_path, 1, f"adamw 7 {STEPS} {run}")
    assert_near(of_2[0], expected)
    assert_near(of_3[0], plain("sgd", 7))
    assert of_3[0]["counted"] < 1e-12, "means over what some parts and ranks have none of"
    assert of_3[0]["counts"][0] != of_3[0]["counts"][2], "shares differ"
    assert_near(of_3[1], plain("chain", 2))
    assert 0 in [count for counts in of_3[1]["counts"] for count in counts], "a rank has no samples"
    assert [found["began"] for found in (of_2[1], of_2[2], of_3[2], of_1)] == [0, 4, 8, 10]
    assert of_2[1]["losses"] + of_2[2]["losses"] == of_2[0]["losses"][:8], (
        "the same bits on the same ranks"
    )
    assert of_1["kept"] == of_3[2]["losses"][-1]
    assert_near(of_1, expected)


def test_names_in_a_checkpoint_are_those_of_the_trees(make: Any, tmp_path: Path) -> None:
    ctx, params, state = make(f"run={tmp_path / 'run'}", optimizer=OPTIMIZERS["chain"])
    params, state = one_step(ctx, params, state)
    ctx.checkpoint(params, state, now=True)
    names = {name for name in ctx._loop.learner.state() if not name.startswith("e.")}
    parameters = ["first.b", "first.w", "rest.0"]
    of_state = {name for name in names if name.startswith("s. ")}
    assert (
        names
        == {f"p.{name}" for name in parameters}
        | {f"s.{name}.{i}" for name in parameters for i in (0, 1)}
        | of_state
    )
    assert (
        "s. 1.hyperparams.learning_rate" in of_state
        and ctx._loop.learner.state_dict_names()["rest.0"] == "p.rest.0"
    )
    ctx.close()
    (start_event,) = [
        json.loads(line)
        for line in (tmp_path / "run/events.jsonl").read_text().splitlines()
        if '"start"' in line
    ]
    assert (
        start_event["framework"] == "jax"
        and start_event["model"] == "64 parameters, jax float64 on cpu:0, no reduction"
    )


def batch_of(ctx: Any) -> Any:
    return next(ctx.samples(DATA, batch=10, epochs=2))


def one_step(ctx: Any, params: Any, state: Any, loss: Any = loss_of) -> Any:
    _, gradient = ctx.value_and_grad(loss)(params, batch_of(ctx))
    return ctx.update(gradient, state, params)


def test_what_a_script_has(make: Any) -> None:
    ctx, params, _ = make()
    assert ctx.device == jax.devices("cpu")[0] and params["first"]["w"].devices() == {ctx.device}
    np.testing.assert_array_equal(params["first"]["w"], start()["first"]["w"])
    batch = batch_of(ctx)
    assert (
        isinstance(batch["x"], jax.Array)
        and batch["x"].dtype == jnp.float64
        and (batch.count, len(batch)) == (10, 10)
    )
    assert jax.random.uniform(batch.key) == jax.jit(lambda b: jax.random.uniform(b.key))(batch)
    again = jax.tree.map(lambda leaf: leaf, batch)
    assert (again.step, again.epoch, again.ends_epoch, list(again.fields)) == (
        0,
        0,
        False,
        ["x", "y"],
    )


def test_number_types_are_those_of_jax(opened: list[ht.Context]) -> None:
    """float32 without jax_enable_x64, also of samples that other threads read."""
    with jax.enable_x64(False):
        opened.append(ht.init("framework=jax", "data.ahead=2"))
        params, state = opened[0].prepare({"w": np.ones((6, 1))}, optax.sgd(0.1))
        for batch in opened[0].samples({"x": jnp.asarray(X32), "y": np.arange(SAMPLES)}, batch=10):
            assert (params["w"].dtype, batch["x"].dtype, batch["y"].dtype) == (
                jnp.float32,
                jnp.float32,
                jnp.int32,
            )
            gradient = opened[0].grad(
                lambda params, batch: jnp.square(batch["x"] @ params["w"]).mean()
            )(params, batch)
            params, state = opened[0].update(gradient, state, params)


X32 = DATA["x"].astype(np.float32)


def test_gradients_are_clipped_by_keys_as_by_optax(make: Any) -> None:
    by_key = make("optim.clip_norm=0.1", optimizer=optax.sgd(1.0))
    found, _ = one_step(*by_key)
    by_key[0].close()
    by_optax = make(optimizer=optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0)))
    expected, _ = one_step(*by_optax)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, expected)
    moved = jax.tree.map(jnp.subtract, found, by_key[1])
    assert np.linalg.norm(
        np.concatenate([np.ravel(array) for array in jax.tree.leaves(moved)])
    ) == pytest.approx(0.1, rel=1e-9)


def test_numbers_that_are_not_finite(make: Any) -> None:
    def train(ctx: Any, params: Any, state: Any) -> Any:
        def loss_at(params: Any, batch: Any) -> Any:
            return loss_of(params, batch) * jnp.where(batch.step == 1, jnp.nan, 1.0)

        trees = [params]
        for batch in ctx.samples(DATA, batch=10, epochs=0.6):
            _, gradient = ctx.value_and_grad(loss_at)(params, batch)
            params, state = ctx.update(gradient, state, params)
            trees.append(params)
            assert not ctx.should_stop
        return trees

    with pytest.raises(
        Diverged, match="1 of the steps up to 2 had a loss or gradient that is not finite"
    ):
        train(*make("log.every_steps=1"))


def test_a_step_that_is_not_finite_is_left_out(make: Any) -> None:
    ctx, params, state = make(
        "log.every_steps=1", "guard.nonfinite=skip", optimizer=OPTIMIZERS["adamw"]
    )

    def loss_at(params: Any, batch: Any) -> Any:
        return loss_of(params, batch) * jnp.where(batch.step == 1, jnp.inf, 1.0)

    weights = [named(params)]
    for batch in ctx.samples(DATA, batch=10, epochs=0.6):
        _, gradient = ctx.value_and_grad(loss_at)(params, batch)
        counts = int(state[0].count)
        params, state = ctx.update(gradient, state, params)
        assert int(state[0].count) - counts == (batch.step != 1)
        weights.append(named(params))
    assert weights[1] == weights[2] and weights[0] != weights[1] and weights[2] != weights[3]


def test_further_arguments_of_a_transformation(make: Any) -> None:
    """The rate is halved where the value that the script gives gets no better."""
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=1)
    ctx, params, state = make(optimizer=optax.chain(optax.sgd(0.1), plateau))
    alone = plateau.init(params)
    found = []
    expected = []
    for batch, value in zip(
        ctx.samples(DATA, batch=10, epochs=1), (3.0, 2.0, 2.0, 2.0, 2.0), strict=True
    ):
        gradient = ctx.grad(loss_of)(params, batch)
        params, state = ctx.update(gradient, state, params, value=value)
        _, alone = plateau.update(params, alone, value=value)
        found.append(float(state[1].scale))
        expected.append(float(alone.scale))
    assert found == expected and len(set(found)) > 1


def test_a_further_argument_that_the_transformation_does_not_take(make: Any) -> None:
    ctx, params, state = make(optimizer=optax.scale(-0.1))
    gradient = ctx.grad(loss_of)(params, batch_of(ctx))
    with pytest.raises(
        UserError,
        match="update.. of the transformation: got an unexpected keyword argument 'value'",
    ):
        ctx.update(gradient, state, params, value=1.0)


def test_values_beside_parameters_and_state() -> None:
    given = {
        "half": jnp.ones((2, 1), jnp.bfloat16),
        "n": jnp.asarray(3),
        "rows": np.arange(2),
        "ema": {"w": [jnp.zeros((0, 2))]},
    }
    found = from_arrays(to_arrays(given))
    assert (
        found["half"].dtype == jnp.bfloat16
        and found["half"].tolist() == [[1.0], [1.0]]
        and found["n"].tolist() == 3
    )
    assert (
        found["rows"].tolist() == [0, 1]
        and found["ema"]["w"][0].shape == (0, 2)
        and isinstance(found["half"], jax.Array)
    )
    with pytest.raises(UserError, match="key is a PRNGKeyArray, which a checkpoint cannot store"):
        to_arrays({"key": jax.random.key(0)})
    broken = to_arrays({"a": jnp.ones(2)})
    broken["e.json"] = np.frombuffer(
        broken["e.json"].tobytes().replace(b"float64", b"nothing"), np.uint8
    )
    with pytest.raises(ValueError, match="nothing"):
        from_arrays(broken)


class DeviceScalar:
    """As JAX has it: float() of it waits for the device."""

    shape = ()

    def __init__(self, number: int, asked: list[int]) -> None:
        self.number = number
        self.asked = asked

    def block_until_ready(self) -> None: ...

    def __float__(self) -> float:
        self.asked.append(self.number)
        return self.number + 1e-9


def test_what_is_logged_is_read_some_steps_later() -> None:
    """A scalar is asked for once 16 more are there, and added up in float64."""
    asked: list[int] = []
    logged = Logged()
    for number in range(40):
        logged.add({"loss": DeviceScalar(number, asked)}, 2.0)
        assert asked == list(range(number - MOST_LATE + 1))
    means = logged.read(SingleProcessCommunicator(), logged.fingerprint())
    assert means == {"loss": pytest.approx(19.5 + 1e-9, rel=1e-15)} and asked == list(range(40))
    logged.add({"loss": jnp.ones((1, 1), jnp.float32)}, 1.0)
    assert logged.read(SingleProcessCommunicator(), logged.fingerprint()) == {"loss": 1.0}
    with pytest.raises(UserError, match="loss is of shape .2,., not one number"):
        logged.add({"loss": jnp.ones(2)}, 1.0)


class Unhashable(list[int]):
    def __call__(self, params: Any, batch: Any) -> Any:
        return loss_of(params, batch)


def doubled(tree: Any) -> Any:
    return jax.tree.map(lambda array: 2 * array, tree)


def mistakes() -> list[Any]:
    def with_gradient(call: Any) -> Any:
        def run(ctx: Any, params: Any, state: Any) -> None:
            batch = batch_of(ctx)
            call(ctx, params, state, ctx.grad(loss_of)(params, batch), batch)

        return run

    def in_batch(call: Any) -> Any:
        return lambda ctx, params, state: call(ctx, params, state, batch_of(ctx))

    def after_step(call: Any) -> Any:
        return lambda ctx, params, state: call(ctx, params, state, *one_step(ctx, params, state))

    def no_step(ctx: Any, params: Any, state: Any) -> None:
        list(ctx.samples(DATA, batch=10))

    def stale(ctx: Any, params: Any, state: Any) -> None:
        first = None
        for batch in ctx.samples(DATA, batch=10):
            first = first or batch
            params, state = ctx.update(ctx.grad(loss_of)(params, first), state, params)

    def many(ctx: Any, params: Any, state: Any) -> None:
        for number in range(40):
            ctx.grad(lambda params, batch, number=number: number)

    whole = "the mean over this rank's samples"
    return [
        (
            no_step,
            "ended without a call of params, state = ctx.update(gradient, state, params)",
            "ctx.value_and_grad(loss_of, at_most=SAMPLES)",
        ),
        (
            with_gradient(lambda c, p, s, g, b: c.update(doubled(g), s, p)),
            "the gradient is not the one that",
            "optax.chain(...)",
        ),
        (
            with_gradient(lambda c, p, s, g, b: c.update(g, s, doubled(p))),
            "the parameters are not the ones that the last step returned",
            "ctx.resume()",
        ),
        (
            with_gradient(lambda c, p, s, g, b: c.update(g, doubled(s), p)),
            "the state is not the one that the last step returned",
            "ctx.resume()",
        ),
        (
            with_gradient(lambda c, p, s, g, b: c.update(p, s, g)),
            "the gradient is not the one that",
            "ctx.value_and_grad(loss_of)",
        ),
        (
            with_gradient(lambda c, p, s, g, b: c.update(g, s, p, value_fn=loss_of)),
            "value_fn is a function",
            "as adamw",
        ),
        (
            with_gradient(lambda c, p, s, g, b: c.grad(loss_of)(p, b)),
            "a second gradient for one batch",
            "at_most=SAMPLES",
        ),
        (
            in_batch(lambda c, p, s, b: c.update(jax.grad(loss_of)(p, b), s, p)),
            "the gradient is not the one that",
            "ctx.value_and_grad",
        ),
        (
            in_batch(lambda c, p, s, b: c.grad(loss_of)(doubled(p), b)),
            "the parameters are not the ones that the last step returned",
            "ctx.update(",
        ),
        (
            in_batch(lambda c, p, s, b: c.grad(lambda p, b: b["x"] @ p["first"]["w"])(p, b)),
            "an array of float64 (10, 8)",
            whole,
        ),
        (in_batch(lambda c, p, s, b: c.grad(lambda p, b: 2.0)(p, b)), "the loss is a float", whole),
        (
            in_batch(lambda c, p, s, b: c.grad(loss_of, has_aux=True)(p, b)),
            "loss_of returns a ",
            "with has_aux=True a tuple of 2",
        ),
        (
            in_batch(lambda c, p, s, b: c.grad(loss_of, has_count=True)(p, b)),
            "loss_of returns a ",
            "a tuple of 2: the mean loss, its count",
        ),
        (
            in_batch(lambda c, p, s, b: c.grad(loss_of, at_most=2)(p, tuple(b))),
            "at_most= divides the batch",
            "(params, batch)",
        ),
        (
            in_batch(lambda c, p, s, b: c.checkpoint(p, s)),
            "there is no run folder",
            "hvdtrain.init",
        ),
        (
            in_batch(lambda c, p, s, b: c.backward(jnp.ones(()))),
            "ctx.backward() does not support the framework",
            "ctx.value_and_grad(loss_of)",
        ),
        (
            in_batch(lambda c, p, s, b: c.accumulate(loss_of, at_most=2)),
            "ctx.accumulate() does not support the framework",
            "at_most=SAMPLES",
        ),
        (
            after_step(lambda c, p, s, new, state: c.checkpoint(p, state)),
            "the parameters are not the ones that the last step returned",
            "ctx.update(",
        ),
        (
            after_step(lambda c, p, s, new, state: c.checkpoint(new, s)),
            "the state is not the one that the last step returned",
            "ctx.update(",
        ),
        (
            after_step(lambda c, p, s, new, state: c.update(new, state, new)),
            "ctx.update() without a new batch",
            "one step for each batch",
        ),
        (
            lambda c, p, s: c.grad(loss_of)(p, DATA),
            "called outside of a loop over ctx.samples()",
            "for batch in ctx.samples",
        ),
        (lambda c, p, s: c.grad(Unhashable()), "loss_of cannot be compiled", "a plain function"),
        (lambda c, p, s: c.grad("loss"), "'loss' is not a function", "def loss_of(params, batch)"),
        (
            lambda c, p, s: c.grad(loss_of, at_most=0),
            "at_most=0 is not a number of samples",
            "of a part, 1 or more",
        ),
        (
            lambda c, p, s: c.grad(loss_of, has_aux=True, at_most=2),
            "has_aux=True with at_most=",
            "one of the two",
        ),
        (stale, "loss_of gets a batch that is not the one of this step", "(params, batch)"),
        (many, "more than 32 different functions", "pass what changes as an argument"),
        (
            lambda c, p, s: c.prepare(p, OPTIMIZERS["sgd"]),
            "ctx.prepare() was called twice",
            "one tree of all parameters",
        ),
        (
            lambda c, p, s: c.resume(),
            "JAX arrays cannot be changed",
            "params, state, kept = ctx.resume(params, state)",
        ),
        (
            lambda c, p, s: c.resume(s, p),
            "the parameters are not the ones that the last step returned",
            "ctx.prepare()",
        ),
    ]


@pytest.mark.parametrize(
    ("run", "what", "fix"),
    mistakes(),
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_mistakes_in_a_loop(make: Any, run: Any, what: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        run(*make())
    assert what in caught.value.what and fix in caught.value.fix, str(caught.value)


def test_parameters_from_before_a_resume_are_refused(make: Any, tmp_path: Path) -> None:
    run = f"run={tmp_path / 'run'}"
    ctx, params, state = make(run)
    ctx.checkpoint(*one_step(ctx, params, state), now=True)
    ctx.close()
    ctx, params, state = make(run)
    new, _, kept = ctx.resume(params, state)
    assert kept == {} and ctx.step == 1 and named(new) != named(params)
    with pytest.raises(
        UserError, match="the parameters are not the ones that the last step returned"
    ):
        ctx.grad(loss_of)(params, batch_of(ctx))
    ctx.close()
    ctx, params, state = make(run, optimizer=OPTIMIZERS["adamw"])
    with pytest.raises(UserError, match="the optimizer that the checkpoint was made with"):
        ctx.resume(params, state)


def typed_key(params: Any) -> Any:
    return {"key": jax.random.key(0)}


@pytest.mark.parametrize(
    ("words", "params", "optimizer", "what", "fix"),
    [
        (
            "framework=jax",
            torch.nn.Linear(1, 1),
            optax.sgd(0.1),
            "a Linear and a GradientTransformation",
            "framework=torch",
        ),
        (
            "framework=jax",
            {"w": X32},
            torch.optim.SGD([torch.ones(1)], 0.1),
            "a dict and a SGD, not a tree of arrays",
            "optax.adamw(1e-3)",
        ),
        (
            "seed=0",
            {"w": X32},
            optax.sgd(0.1),
            "a dict and a GradientTransformation",
            "hvdtrain.init('framework=jax', ...)",
        ),
        ("framework=jax", X32, optax.sgd(0.1), "the parameters are one array", '{"w": w}'),
        (
            "framework=jax",
            {},
            optax.sgd(0.1),
            "the parameters are a tree without arrays",
            '{"w": w}',
        ),
        (
            "framework=jax",
            {"a": {"b": X32}, "a.b": X32},
            optax.sgd(0.1),
            "two parameters are named a.b",
            "keys without a dot",
        ),
        (
            "framework=jax",
            {"w": 1.0},
            optax.sgd(0.1),
            "the parameter w is a float",
            "arrays of float32 or float64",
        ),
        (
            "framework=jax",
            {"w": np.arange(3)},
            optax.sgd(0.1),
            "the parameter w is an array of int64",
            "to loss_of separately",
        ),
        (
            "framework=jax",
            {"w": X32},
            optax.GradientTransformation(typed_key, lambda g, s, p: (g, s)),
            "an array of key<fry> at key",
            "jax.random.PRNGKey()",
        ),
        (
            "framework=jax shard.stage=1",
            {"w": X32},
            optax.sgd(0.1),
            "the whole state on every rank",
            "shard.stage=0",
        ),
        (
            "framework=jax speed.precision=fp64",
            {"w": X32},
            optax.sgd(0.1),
            "keep the types",
            "jax_enable_x64",
        ),
    ],
)
def test_what_is_not_trained(
    opened: list[ht.Context], words: str, params: Any, optimizer: Any, what: str, fix: str
) -> None:
    opened.append(ht.init(*words.split()))
    with pytest.raises(UserError) as caught:
        opened[0].prepare(params, optimizer)
    assert what in caught.value.what and fix in caught.value.fix, str(caught.value)
    with pytest.raises(UserError, match="no model was prepared"):
        opened[0].samples(DATA, batch=2)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (
            "framework=numpy",
            "framework=numpy does not support custom loops\n.*\n  fix: framework=jax or torch",
        ),
        ("framework=jax comm.local_steps=2", "framework=jax"),
        ("framework=jax guard.lost=shrink", "guard.lost is not supported in a custom loop"),
    ],
)
def test_keys_that_do_not_go_together(words: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        ht.init(*words.split())


def test_a_lost_rank_ends_the_loop(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="guard.lost=shrink does not support framework=jax"):
        ht.run(lambda ctx: None, "framework=jax", "guard.lost=shrink", f"run={tmp_path / 'run'}")


def test_calls_of_jax_in_a_loop_of_torch(opened: list[ht.Context]) -> None:
    opened.append(ht.init())
    ctx = opened[0]
    net = torch.nn.Linear(6, 1)
    ctx.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    for call, fix in [
        (lambda: ctx.grad(loss_of), "ctx.backward(loss); or another framework="),
        (lambda: ctx.update(1, 2, 3), "optimizer.step(); or another framework="),
        (lambda: ctx.resume(1, 2), "state = ctx.resume()"),
    ]:
        with pytest.raises(UserError) as caught:
            call()
        assert fix in caught.value.fix
