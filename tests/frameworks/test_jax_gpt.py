"""model.name=gpt in JAX: the numbers of torch's, its dropout, the tokens that it draws, and jobs
that go on in the other framework."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ranks import ROOT, mpirun, needs_extra, needs_mpirun, python

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Batch, digest
from hvdtrain.core.extras import implementing_module
from hvdtrain.core.progress import Hyper
from hvdtrain.data.field import Field
from hvdtrain.errors import UserError
from hvdtrain.frameworks.jax.layers import Functions
from hvdtrain.frameworks.jax.models.gpt import build
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks.language import Language
from hvdtrain.training.build import build_learner

pytestmark = [pytest.mark.usefixtures("jax_compilation_cache"), pytest.mark.in_turn]

CONTEXT = 6
VOCABULARY = 9
SIZES = "model.name=gpt model.layers=2 model.heads=2 model.width=8"


def learner(framework: str, *words: str, ignore: int | None = None) -> Any:
    given = [
        f"framework={framework}",
        "task.name=language",
        "speed.precision=fp64",
        "batch.size=8",
        *words,
    ]
    given += [] if any("model.name=" in word for word in words) else SIZES.split()
    task = Language(Field("uint16", (CONTEXT + 1,), VOCABULARY), ignore)
    return build_learner(configure(None, given), task, SingleProcessCommunicator())


def sampler(one: Learner) -> Any:
    return implementing_module("log.samples").sampler_of(one, configure(None, []))


def batch(n: int, seed: int = 0) -> Batch:
    return {
        "tokens": np.random.default_rng(seed)
        .integers(0, VOCABULARY, (n, CONTEXT + 1))
        .astype(np.uint16)
    }


def step(one: Learner, number: int, seed: int = 1) -> dict[str, float]:
    hyper = Hyper(lr=0.2, momentum=0.9, weight_decay=0.01, batch=7, step=number)
    return {
        name: float(value)
        for name, value in one.step([one.to_device(batch(7, number))], hyper, seed).items()
    }


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("words", "ignore"),
    [
        ("", None),
        ("model.tied=true model.label_smoothing=0.1", 3),
        ("model.recompute=all optim.name=lars optim.trust=0.1", None),
    ],
)
def test_jax_and_torch_move_a_gpt_alike(words: str, ignore: int | None) -> None:
    """In ten steps from weights that are large enough to be seen; of seven samples, which take
    eight rows."""
    torchs, jaxs = (
        learner(framework, *words.split(), ignore=ignore) for framework in ("torch", "jax")
    )
    dice = np.random.default_rng(2)
    torchs.load(
        state := {
            name: a + dice.normal(0, 0.1, a.shape) * name.startswith("p.")
            for name, a in torchs.state().items()
        }
    )
    jaxs.load(state)
    for number in range(10):
        assert step(jaxs, number) == pytest.approx(step(torchs, number), rel=1e-12)
    found = jaxs.state()
    expected = torchs.state()
    assert found.keys() == expected.keys() and jaxs.state_dict_names() == torchs.state_dict_names()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-11, atol=1e-13, err_msg=name)
    sums = [
        {name: float(value) for name, value in one.evaluate(one.to_device(batch(5, 99))).items()}
        for one in (torchs, jaxs)
    ]
    assert sums[1] == pytest.approx(sums[0], rel=1e-12)


def test_the_first_weights_follow_the_law_of_torchs() -> None:
    functions = build("gpt", 200, 300, layers=8, heads=2, width=128)
    params = functions.init(jax.random.key(0))
    for name, array in params.items():
        if array.ndim == 1:
            assert (array == (1.0 if "norm" in name and name.endswith("weight") else 0.0)).all(), (
                name
            )
            continue
        expected = (
            0.01
            if name == "positions.weight"
            else 0.02 / 4
            if name.endswith(("attention.output.weight", "fc2.weight"))
            else 0.02
        )
        assert np.std(array) == pytest.approx(expected, rel=0.03), name


@pytest.mark.in_turn
@pytest.mark.parametrize("option", ["embedding_dropout", "attention_dropout", "residual_dropout"])
def test_each_dropout_drops_in_training_alone_by_its_key(option: str) -> None:
    sizes: dict[str, Any] = {"layers": 2, "heads": 2, "width": 8}
    functions = build("gpt", CONTEXT, VOCABULARY, **sizes, **{option: 0.5})
    plain = build("gpt", CONTEXT, VOCABULARY, **sizes)
    params = {name: array + 0.1 for name, array in functions.init(jax.random.key(0)).items()}
    tokens = jnp.asarray(batch(3)["tokens"][:, :-1], jnp.int32)
    a, again, other = (
        functions.apply(params, tokens, key=jax.random.key(seed)) for seed in (1, 1, 2)
    )
    assert jnp.array_equal(a, again) and not jnp.array_equal(a, other)
    assert jnp.array_equal(functions.apply(params, tokens), plain.apply(params, tokens))
    assert not jnp.array_equal(a, functions.apply(params, tokens))


def test_dropout_of_a_step_follows_from_its_seed_and_micro_batch() -> None:
    """Recomputed blocks drop the same activations again."""
    words = ["model.residual_dropout=0.5", "model.attention_dropout=0.2"]
    a, b, c, d = (learner("jax", *words, *more) for more in ([], [], [], ["model.recompute=all"]))
    for one, seed in ((a, 7), (b, 7), (c, 8), (d, 7)):
        step(one, 0, seed)
    assert digest(a.state()) == digest(b.state()) != digest(c.state())
    for name, array in a.state().items():
        np.testing.assert_allclose(d.state()[name], array, rtol=1e-12, atol=1e-15)
    hyper = Hyper(lr=1.0, momentum=0.0, weight_decay=0.0, batch=2)
    same = batch(1)
    halves = [learner("jax", *words) for _ in range(2)]
    halves[0].step([halves[0].to_device(same)] * 2, hyper, 7)
    halves[1].step([halves[1].to_device(same)], hyper._replace(batch=1), 7)
    assert digest(halves[0].state()) != digest(halves[1].state()), (
        "two passes of one sample dropped the same"
    )


@needs_extra("sample")
@pytest.mark.in_turn
@pytest.mark.parametrize("length", [7, 15])
def test_jax_draws_the_tokens_that_torch_draws(length: int) -> None:
    """Prompts of two positions; 15 are beyond the context, of which the second half is read again,
    twice."""
    torchs, jaxs = (learner(framework, "model.tied=true") for framework in ("torch", "jax"))
    torchs.load(
        {
            name: a * (8 if name.endswith("weight") and a.ndim == 2 else 1)
            for name, a in torchs.state().items()
        }
    )
    jaxs.load(torchs.state())
    prompts = np.array([[8, 1], [8, 2], [0, 3]])
    drawing = [sampler(one) for one in (torchs, jaxs)]
    of_jax = drawing[1]
    for temperature in (0.7, 0.0):
        calls: list[int] = []
        options: dict[str, Any] = {
            "tokens": 8,
            "temperature": temperature,
            "seed": 4,
            "before_each": lambda calls=calls: calls.append(0),
        }
        found = [one.continue_sequences(prompts, length, first=5, **options) for one in drawing]
        np.testing.assert_array_equal(found[0], found[1])
        assert len({tuple(row) for row in found[1][:, 2:].tolist()}) > 1
        np.testing.assert_array_equal(
            of_jax.continue_sequences(prompts[1:], length, first=6, **options), found[1][1:]
        )
        assert of_jax.continue_sequences(prompts[:0], length, first=0, **options).shape == (
            0,
            length,
        )
        assert len(calls) == 4 * (length - 2)


def without_reader(context: int, vocabulary: int) -> Functions:
    functions = build("gpt", context, vocabulary, layers=1, heads=1, width=4)
    return functions._replace(reader=None)


@needs_extra("sample")
def test_a_model_that_cannot_be_read_token_by_token_is_refused() -> None:
    one = learner("jax", f"model.name={__name__}:without_reader")
    with pytest.raises(
        UserError, match="without_reader has no reader, so it cannot generate token by token"
    ):
        sampler(one).continue_sequences(
            np.ones((1, 1), int),
            3,
            tokens=8,
            temperature=1.0,
            seed=1,
            first=0,
            before_each=lambda: None,
        )


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"heads": 3}, "4 layers of 3 heads and width 128 are not valid"),
        ({"layers": 0}, "0 layers of 4 heads and width 128 are not valid"),
        ({"residual_dropout": 1.0}, "a dropout of 1.0 would drop everything"),
    ],
)
def test_impossible_sizes_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        build("gpt", CONTEXT, VOCABULARY, **options)


JOB = (
    "task.name=language data.name=drawn_job:tokens data.samples=45 data.val_samples=12 "
    f"task.ignore=0 {SIZES} speed.precision=fp64 "
)
JOB += (
    "batch.size=13 optim.name=sgd optim.base_lr=0.3 log.every_steps=1 evaluate.every_steps=2 "
    "epochs=50 checkpoint.keep_last=9"
)


def curve(size: int, run: Path, *words: str) -> list[float]:
    """The losses of a job's steps and evaluations."""
    argv = ["-m", "hvdtrain", *JOB.split(), *words, f"run={run}"]
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}"}
    result = mpirun(size, argv, env=env) if size > 1 else python(argv, env=env)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [
        value
        for e in events
        if e["kind"] in ("step", "eval")
        for key, value in e.items()
        if key in ("loss", "val_loss")
    ]


@pytest.mark.in_turn
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=needs_mpirun)])
def test_a_job_goes_on_in_the_other_framework(size: int, tmp_path: Path) -> None:
    """torch for 8 steps; torch for 3, then JAX for 3, then torch again: every number is the
    same."""
    whole = curve(1, tmp_path / "whole", "stop.steps=8")
    curve(1, tmp_path / "first", "stop.steps=3")
    by_jax = curve(
        size, tmp_path / "jax", "framework=jax", f"resume={tmp_path / 'first'}", "stop.steps=6"
    )
    by_torch = curve(size, tmp_path / "torch", f"resume={tmp_path / 'jax'}", "stop.steps=8")
    assert [*by_jax, *by_torch] == pytest.approx(whole[-len(by_jax) - len(by_torch) :], rel=1e-12)
    assert (
        len(by_jax) >= 3 and len(by_torch) >= 2 and whole[0] != pytest.approx(whole[-1], rel=1e-3)
    )
