"""optim.name=optax:adamw, or a function of the user's, in JAX: the weights of optax alone, on
ranks, with shards, resumed; and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ranks import mpirun, needs_extra, needs_mpirun, python
from safetensors.numpy import load_file
from test_jax_zero import RANKS, TASK, batch, on_ranks

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Batch, digest
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Learner
from hvdtrain.training.build import build_learner

pytestmark = [pytest.mark.usefixtures("jax_compilation_cache"), pytest.mark.in_turn]

STEPS = 5


def rate(step: Any) -> Any:
    return 0.05 / (1 + step)


def clipped(
    learning_rate: float, weight_decay: float = 0.0, limit: float = 0.01
) -> optax.GradientTransformation:
    """A user's own: the norm is of all parameters, whose labels follow from their names, and the
    decay is left to the caller."""
    kinds = {"w": optax.adam(learning_rate), "b": optax.sgd(learning_rate, 0.9)}
    own = optax.multi_transform(
        kinds,
        lambda params: jax.tree_util.tree_map_with_path(lambda path, _: kind_of(path), params),
    )
    return optax.chain(
        optax.clip_by_global_norm(limit), optax.add_decayed_weights(weight_decay), own
    )


def kind_of(path: Any) -> str:
    return "b" if "bias" in jax.tree_util.keystr(path) else "w"


def without_rate(sign: float = -1.0) -> optax.GradientTransformation:
    return optax.chain(optax.scale_by_adam(), optax.scale(sign))


def forgetful(weight_decay: float = 0.0) -> optax.GradientTransformation:
    return optax.chain(
        *([optax.add_decayed_weights(weight_decay)] if weight_decay else []), optax.sgd(1.0)
    )


def learner(communicator: Communicator, *words: str) -> Learner:
    given = [
        "framework=jax",
        "model.name=linear",
        "speed.precision=fp64",
        "batch.size=12",
        "optim.base_lr=0.05",
    ]
    return build_learner(configure(None, [*given, *words]), TASK, communicator)


def take_steps(one: Learner, rank: int | None, first: int = 0, last: int = STEPS) -> None:
    """rank: whose samples it has; None: it has all of them."""
    batches = [
        batch(each, number)
        for each in (range(RANKS) if rank is None else [rank])
        for number in range(2)
    ]
    for step in range(first, last):
        one.step(
            [one.to_device(each) for each in batches],
            Hyper(rate(step), 0.0, 0.0, batch=12, step=step),
            5,
        )


def by_optax(
    transform: optax.GradientTransformation, params: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Weights after STEPS steps of optax alone, on the samples of all ranks."""
    batches = [batch(rank, number) for rank in range(RANKS) for number in range(2)]
    whole: Batch = {key: np.concatenate([each[key] for each in batches]) for key in ("x", "y")}
    x = (
        ((whole["x"] / 255 - TASK.mean) / TASK.std)
        .transpose(0, 3, 1, 2)
        .reshape(len(whole["y"]), -1)
    )

    def loss(params: dict[str, Any]) -> jax.Array:
        logits = x @ params["fc.weight"].T + params["fc.bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, whole["y"]).mean()

    with jax.enable_x64(True):
        params = {name: jnp.asarray(array) for name, array in params.items()}
        state = transform.init(params)
        for _ in range(STEPS):
            updates, state = transform.update(jax.grad(loss)(params), state, params)
            params = optax.apply_updates(params, updates)
        return {name: np.asarray(array) for name, array in params.items()}


def weights(one: Learner) -> dict[str, np.ndarray]:
    return {name[2:]: array for name, array in one.state().items() if name.startswith("p.")}


MASK = {"fc.weight": True, "fc.bias": False}
HERE = "optim.name=test_jax_optax:"
CASES: dict[str, tuple[list[str], Callable[[], Any], bool]] = {
    "sgd": (
        ["optim.name=optax:sgd", "optim.momentum=0.9", "optim.nesterov=true"],
        lambda: optax.sgd(rate, 0.9, nesterov=True),
        True,
    ),
    "adamw": (
        ["optim.name=optax.adamw", "optim.b2=0.98"],
        lambda: optax.adamw(rate, b2=0.98),
        True,
    ),
    "adamw, decay of some": (
        ["optim.name=optax:adamw", "optim.weight_decay=0.3", "optim.momentum=0.8"],
        lambda: optax.adamw(rate, b1=0.8, weight_decay=0.3, mask=MASK),
        True,
    ),
    "lion": (
        ["optim.name=optax:lion", "optim.weight_decay=0.2", "optim.exclude=none"],
        lambda: optax.lion(rate, weight_decay=0.2),
        True,
    ),
    "adafactor": (
        ["optim.name=optax:adafactor", "optim.min_dim_size_to_factor=2"],
        lambda: optax.adafactor(rate, min_dim_size_to_factor=2),
        False,
    ),
    "own": ([f"{HERE}clipped", "optim.limit=0.02"], lambda: clipped(rate, limit=0.02), False),  # type: ignore[arg-type]
    "without rate": (
        [f"{HERE}without_rate"],
        lambda: optax.chain(
            optax.scale_by_adam(), optax.scale_by_schedule(lambda step: -rate(step))
        ),
        True,
    ),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("case", list(CASES))
def test_ranks_have_the_weights_of_optax_alone_and_go_on_with_the_same_bits(case: str) -> None:
    """On one rank and on two, without shards and with those of stages 1 and 2, where the
    transformation is elementwise."""
    words, transform, is_elementwise = CASES[case]
    start = weights(learner(SingleProcessCommunicator(), *words))
    expected = by_optax(transform(), start)
    assert all(np.abs(expected[name] - start[name]).max() > 1e-4 for name in start)

    def of_rank(communicator: Communicator, *more: str) -> dict[str, np.ndarray]:
        rank = communicator.rank if communicator.size > 1 else None
        one, halted = (learner(communicator, *words, *more) for _ in range(2))
        take_steps(one, rank)
        take_steps(halted, rank, 0, 3)
        again = learner(communicator, *words, *more)
        again.load(halted.state())
        take_steps(again, rank, 3)
        assert digest(again.state()) == digest(one.state()), more
        return one.state()

    states = [of_rank(SingleProcessCommunicator()), *on_ranks(of_rank)]
    if is_elementwise:
        states += [
            state
            for stage in (1, 2)
            for state in on_ranks(lambda each, stage=stage: of_rank(each, f"shard.stage={stage}"))
        ]
    else:
        refused(
            ["shard.stage=1", *words],
            "on parts of a parameter; such a step",
            "or shard.stage=0",
        )
    assert states[0].keys() == states[-1].keys()
    for state in states:
        for name, array in expected.items():
            np.testing.assert_allclose(state[f"p.{name}"], array, rtol=0, atol=1e-12, err_msg=name)


def test_the_state_has_lasting_names() -> None:
    found = {
        name: learner(SingleProcessCommunicator(), *CASES[name][0]).state()
        for name in ("sgd", "adamw", "own")
    }
    parameters = {"p.fc.weight", "p.fc.bias"}
    assert found["sgd"].keys() == parameters | {
        "s.fc.weight.0",
        "s.fc.bias.0",
        "s.made by optax.sgd",
    }
    assert found["adamw"].keys() == parameters | {"s.made by optax.adamw", "s. 0.count"} | {
        f"s.fc.{which}.{i}" for which in ("weight", "bias") for i in range(2)
    }
    inner = {
        "s. 2.inner_states.w.inner_state.0.count",
        "s.fc.weight.0",
        "s.fc.weight.1",
        "s.fc.bias.0",
    }
    assert found["own"].keys() == parameters | inner | {"s.made by test_jax_optax.clipped"}


def refused(words: list[str], what: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        learner(SingleProcessCommunicator(), *words)
    assert what in f"{caught.value.what}", caught.value.what
    assert fix in f"{caught.value.fix}", caught.value.fix


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (
            ["optim.name=optax:adamw", "optim.beta2=0.9"],
            "does not fit: got an unexpected keyword argument 'beta2'",
            "optim.<name>=<value>",
        ),
        (
            ["optim.name=optax:adamw", "optim.learning_rate=1"],
            "optim.learning_rate is not an option",
            "optim.base_lr",
        ),
        (
            ["optim.name=optax:sgd", "optim.weight_decay=0.1"],
            "optax:sgd has no weight_decay; it has learning_rate",
            "leave optim.weight",
        ),
        (["optim.name=optax:adafactor", "optim.weight_decay=0"], "", ""),
        (["optim.name=optax:rmsprop", "optim.momentum=0.5"], "", ""),
        (
            ["optim.name=optax:adagrad", "optim.momentum=0.5"],
            "optax:adagrad has no momentum; it has",
            "leave optim.momentum out",
        ),
        (
            ["optim.name=optax:lbfgs"],
            "a step of optax:lbfgs fails: TypeError",
            "only takes gradients, states and parameters",
        ),
        (
            ["optim.name=optax:global_norm"],
            "does not fit: missing a required argument",
            "optim.<name>=<value>",
        ),
        (
            ["optim.name=optax:constant_schedule", "optim.value=1"],
            "returned a function, not a GradientTransformation",
            "optax:adamw",
        ),
        (
            ["optim.name=optax:sgd", "optim.momentum=0.5", "optim.accumulator_dtype=what"],
            "optax:sgd fails: data type 'what' not understood",
            "optim.<name>",
        ),
        (
            [f"{HERE}without_rate", "optim.sign=1"],
            "has no parameter learning_rate, and its update would ascend",
            "scale(-1.0)",
        ),
        (
            [f"{HERE}forgetful", "optim.weight_decay=0.5"],
            "with weight_decay=0, as used for norms and biases, test_jax_optax:forgetful keeps a "
            "different state",
            "optim.exclude=none",
        ),
        (
            ["optim.name=optax:adamw", "framework=torch"],
            "optax:adamw is a function of optax, but framework=torch needs a rule",
            "framework=jax",
        ),
        (
            ["optim.name=optax:adamw", "framework=numpy"],
            "optax:adamw is a function of optax, but framework=numpy needs a rule",
            "framework=jax",
        ),
        (
            [f"{HERE}clipped", "framework=torch"],
            "is not a subclass of torch.optim.Optimizer",
            "functions of optax are for framework=jax",
        ),
        (
            ["optim.name=optax:apply_if_finite"],
            "does not fit: missing a required argument: 'inner'",
            "",
        ),
    ],
)
def test_what_does_not_fit_is_refused(words: list[str], what: str, fix: str) -> None:
    if not what:
        learner(SingleProcessCommunicator(), *words)
        return
    refused(words, what, fix)


def unless_nan(learning_rate: float) -> optax.GradientTransformation:
    return optax.apply_if_finite(optax.sgd(learning_rate), 3)


def test_a_decision_of_all_gradients_is_not_elementwise() -> None:
    refused(
        [f"{HERE}unless_nan", "shard.stage=2"],
        "gives other numbers than one on the whole",
        "shard.stage=0",
    )


def test_a_state_of_another_optimizer_is_refused() -> None:
    def one(*words: str) -> Learner:
        return learner(SingleProcessCommunicator(), *words)

    for words, former, what in [
        (
            ["optim.name=optax:lion"],
            ["optim.name=optax:sgd", "optim.momentum=0.9"],
            "written with optax.sgd, but this job has optim.name=optax.lion",
        ),
        (
            ["optim.name=optax:adam"],
            ["optim.name=adam"],
            "written with one of hvdtrain's own optimizers, but this job has optim.name=optax.adam",
        ),
        (
            ["optim.name=adam"],
            ["optim.name=optax:adam"],
            "written with optax.adam, but this job has optim.name=one of hvdtrain's own",
        ),
    ]:
        with pytest.raises(UserError, match=what):
            one(*words).load(one(*former).state())
    plain = {
        name: array
        for name, array in one("optim.name=adam").state().items()
        if name.startswith("p.")
    }
    with pytest.raises(UserError, match="the state lacks s"):
        one("optim.name=optax:adam").load(plain)


@needs_extra("export")
@needs_mpirun
def test_a_job_stops_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """On two ranks with shards; and its numbers are those of one rank."""
    words = [
        "-m",
        "hvdtrain",
        "framework=jax",
        "model.name=linear",
        "speed.precision=fp64",
        "batch.size=33",
        "optim.name=optax:adamw",
    ]
    words += ["optim.base_lr=0.01", "optim.weight_decay=0.1", "recipe.warmup=0.5", "stop.steps=40"]

    def trained(size: int, name: str, *more: str) -> dict[str, np.ndarray]:
        argv = [*words, f"run={tmp_path / name}", *more]
        done = mpirun(size, argv) if size > 1 else python(argv)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (
            "recipe  optax:adamw, lr" in done.stdout
            and "weight decay 0.1 but for norms and biases, optim.weight_decay" in done.stdout
        )
        out = tmp_path / f"{name}.safetensors"
        assert main(["export", str(tmp_path / name), "--to", str(out), "--force"]) == 0
        return load_file(out)

    straight = trained(2, "straight", "shard.stage=1")
    alone = trained(1, "alone")
    trained(2, "halted", "shard.stage=1", "stop.steps=23")
    again = trained(2, "halted", "shard.stage=1", f"resume={tmp_path / 'halted'}")
    for name, array in straight.items():
        assert again[name].tobytes() == array.tobytes(), name
        np.testing.assert_allclose(alone[name], array, rtol=0, atol=1e-12)


def run_of(folder: Path, *words: str, **given: Any) -> hvdtrain.Run:
    common = [
        "model.name=linear",
        "speed.precision=fp64",
        "batch.size=100",
        "epochs=1",
        "log.display=lines",
    ]
    return hvdtrain.train(f"run={folder}", *common, *words, **given)


def same(a: hvdtrain.Run, b: hvdtrain.Run, tolerance: float = 1e-14) -> bool:
    return all(
        np.allclose(a.weights[name], array, rtol=0, atol=tolerance)
        for name, array in b.weights.items()
    )


@needs_extra("trained_models")
def test_a_script_gives_the_transformation_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rate and its decay are its own; a rate of the recipe is a factor; functions and their
    names are as optim.name has them."""
    words = ["framework=jax", "optim.base_lr=0.003", "optim.weight_decay=0.2", "optim.exclude=none"]
    named = run_of(tmp_path / "named", *words, "optim.name=optax:adamw")
    assert np.abs(named.weights["fc.weight"]).max() > 0.02
    given = run_of(tmp_path / "given", optimizer=optax.adamw(0.003, weight_decay=0.2))
    assert same(given, named), "and framework=jax follows"
    assert "GradientTransformationExtraArgs>, its own rate times lr 1\n" in capsys.readouterr().out
    assert (
        "<object of optax._src.base:GradientTransformationExtraArgs"
        in (tmp_path / "given" / "config.yaml").read_text()
    )
    half = run_of(
        tmp_path / "half",
        "optim.base_lr=0.5",
        "optim.momentum=null",
        optimizer=optax.adamw(0.006, weight_decay=0.2),
    )
    assert same(half, named)
    assert not same(
        run_of(tmp_path / "full", optimizer=optax.adamw(0.006, weight_decay=0.2)), named
    )
    assert same(run_of(tmp_path / "function", *words, optimizer=optax.adamw), named, 0)
    assert "name: optax:adamw" in (tmp_path / "function" / "config.yaml").read_text()
    assert same(run_of(tmp_path / "text", *words, optimizer="optax.adamw"), named, 0)
    assert same(
        run_of(
            tmp_path / "lambda",
            *words[:2],
            optimizer=lambda learning_rate: optax.adamw(learning_rate, weight_decay=0.2),
        ),
        named,
    )
    run_of(tmp_path / "halted", "stop.steps=7", optimizer=optax.adamw(0.003, weight_decay=0.2))
    again = run_of(
        tmp_path / "halted", "stop.steps=null", optimizer=optax.adamw(0.003, weight_decay=0.2)
    )
    assert again.steps == given.steps and same(again, given, 0)
    x = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), dtype=np.uint8)
    assert hvdtrain.predict(given, x).shape == (3, 10)


@pytest.mark.parametrize(
    ("words", "optimizer", "what", "fix"),
    [
        ([], 3, "optimizer is a int", "a class of torch.optim"),
        (
            ["framework=torch"],
            optax.sgd(0.1),
            "optim belongs to framework=jax, but the job has framework=torch",
            "framework=jax",
        ),
        (
            ["optim.momentum=0.5"],
            optax.sgd(0.1),
            "has no momentum; it has no parameters",
            "leave optim.momentum out",
        ),
        (
            ["optim.b2=0.5"],
            optax.sgd(0.1),
            "does not fit: got an unexpected keyword argument 'b2'",
            "optim.<name>=<value>",
        ),
        (
            [],
            optax.scale(1.0),
            "its update would ascend the gradient",
            "optax.scale(-1.0)",
        ),
    ],
)
def test_what_is_no_transformation_is_refused(
    words: list[str], optimizer: Any, what: str, fix: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        run_of(tmp_path / "refused", *words, optimizer=optimizer)
    assert what in f"{caught.value.what}", caught.value.what
    assert fix in f"{caught.value.fix}", caught.value.fix


def test_a_run_with_an_object_goes_on_in_its_script_alone(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "stop.steps=3", optimizer=optax.sgd(0.1))
    for words, what, fix in [
        (
            [f"resume={run.folder}"],
            "is an object that only its script defines",
            "optim.name=package.module:function",
        ),
        (
            [f"resume={run.folder}", "framework=jax", "optim.name=sgd"],
            "the checkpoint was written with optim.name=<object of",
            "resume=no",
        ),
    ]:
        with pytest.raises(UserError) as caught:
            hvdtrain.train(*words)
        assert what in f"{caught.value.what}", caught.value.what
        assert fix in f"{caught.value.fix}", caught.value.fix
