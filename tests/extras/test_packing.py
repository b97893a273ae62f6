"""data.pack: rows of several sequences beside these sequences alone, in a model and in jobs on 1, 2
and 3 ranks; what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import packing_jobs
import pool
import pytest
import sequence_jobs
import torch
from packing_jobs import PACK, ROW, gpt
from ranks import HIGHEST_STAGE, mpirun, needs_extra, needs_mpirun
from sequence_jobs import JOB, Sequences, tokens

import hvdtrain
from hvdtrain.data.packed import PADDING
from hvdtrain.data.source import Source
from hvdtrain.data.user_data.as_source import as_source
from hvdtrain.errors import UserError
from hvdtrain.extras.packing.packed import first_fit, packed
from hvdtrain.tasks import language
from hvdtrain.tasks.torch import TorchLanguage


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def source_of(samples: Any, length: int) -> Source:
    return packed(
        as_source(samples, "mine", "here", padding=PADDING), length, "training", "data.pack"
    )


def test_sequences_go_into_the_first_row_with_room() -> None:
    rows = first_fit(np.array([3, 4, 0, 2, 1, 5, 2]), 6)
    assert [
        rows.values[begin:end].tolist()
        for begin, end in zip(rows.edges, rows.edges[1:], strict=False)
    ] == [[0, 3], [1, 6], [5]]
    # the first 6 of 70 rows with room are looked at no more
    long_then_short = first_fit(np.array([7] * 70 + [3] * 70), 10)
    assert [len(long_then_short), *long_then_short.lengths[[5, 6, 69, 70, 71]]] == [
        72,
        1,
        2,
        2,
        3,
        3,
    ]
    assert long_then_short.values[long_then_short.edges[6] : long_then_short.edges[7]].tolist() == [
        6,
        70,
    ]


@pytest.mark.parametrize(
    "of", [lambda found: {"tokens": found}, Sequences], ids=["arrays", "dataset"]
)
def test_a_row_has_its_sequences_and_their_segments(of: Callable[[Any], Any]) -> None:
    source = source_of(of([np.array(one) for one in ([3, 4, 5], [6, 7, 8, 9], [1], [10, 2])]), 6)
    batch = source.read(np.array([1, 0]))
    assert batch["tokens"].tolist() == [[6, 7, 8, 9, 0, 0], [3, 4, 5, 10, 2, 0]]
    assert (
        batch["segments"].tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 2, 2, 0]]
        and batch["segments"].dtype == np.int64
    )
    assert source.read(np.array([], np.int64))["tokens"].shape == (0, 6)
    lengths = source.known_lengths("tokens")
    assert lengths is not None and lengths.tolist() == [5, 4]
    assert source.notes[-1] == (
        "training: 3 sequences in 2 rows of 6 tokens, 75.0% real tokens; left out, as nothing is "
        "predicted in one token: 1"
    )
    task = language.build("language", source, source, "here")
    assert task.weight(batch) == 6 and language.restore(task.facts()) == task


def test_losses_and_gradients_are_those_of_each_sequence_alone() -> None:
    sequences = tokens()
    model = gpt()
    source = source_of({"tokens": sequences}, ROW)
    part = TorchLanguage(None, 0.0, packed=True)
    batch = source.read(np.arange(len(source)))
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    each = part.each(model(**part.inputs(tensors)), tensors, training=True)
    found = torch.autograd.grad(each.loss.sum(), list(model.parameters()))
    losses, counts = zip(*(packing_jobs.alone(model, one) for one in sequences), strict=True)
    expected = torch.autograd.grad(torch.stack(losses).sum(), list(model.parameters()))
    torch.testing.assert_close(each.loss.sum(), torch.stack(losses).sum(), rtol=1e-12, atol=0)
    task = language.build("language", source, source, "here")
    assert int(each.terms["tokens"].sum()) == sum(counts) == task.weight(batch)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.in_turn
@needs_mpirun
def test_steps_are_those_of_sequences_alone_on_ranks_and_resumed(tmp_path: Path) -> None:
    ways = [
        "three",
        f"stage-3 {HIGHEST_STAGE} model.recompute=all",
        "stopped stop.steps=4",
        "stopped-too stop.steps=4",
    ]
    for size, words in {3: ways, 2: ["two shard.stage=2", "stopped"]}.items():
        done = mpirun(size, pool.alone("packing_jobs:on_ranks", str(tmp_path), *words))
        assert done.returncode == 0, done.stdout + done.stderr
    found = {name: dict(np.load(f"{name}.npz")) for name in ("three", "stage-3", "two", "stopped")}
    found |= {
        "one": packing_jobs.packed("one", of=Sequences).weights,
        "resumed": packing_jobs.packed("stopped-too").weights,
    }
    expected = packing_jobs.packed_by_hand()
    for name, weights in found.items():
        for key, array in expected.items():
            np.testing.assert_allclose(
                weights[key], array, rtol=0, atol=1e-12, err_msg=f"{name} {key}"
            )
    with pytest.raises(UserError, match="the checkpoint has another data.samples: 19"):
        packing_jobs.packed("two", "data.pack=30", "stop.steps=20")


@needs_extra("trained_models")
def test_evaluations_predictions_and_continuations() -> None:
    run = packing_jobs.packed("run")
    model = gpt()
    validation = tokens(20, 8)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in run.weights.items()})
    with torch.no_grad():
        losses, counts = zip(*(packing_jobs.alone(model, one) for one in validation), strict=True)
        logits = model(torch.from_numpy(validation[4])[None, :-1])[0]
    assert run.last == pytest.approx(float(sum(losses)) / sum(counts), abs=1e-12)
    assert hvdtrain.evaluate(run, {"tokens": validation}, "batch.evaluate=3")[
        "loss"
    ] == pytest.approx(run.last, abs=1e-12)
    outputs = hvdtrain.predict(run, {"tokens": validation})
    np.testing.assert_allclose(outputs[4][: len(logits)], logits.numpy(), rtol=0, atol=1e-12)
    windows = np.stack([np.resize(one, ROW - 1) for one in validation if len(one)])
    with torch.no_grad():
        total = sum(float(packing_jobs.alone(model, one)[0]) for one in windows)
    assert hvdtrain.evaluate(run, windows)["loss"] == pytest.approx(
        total / windows[:, 1:].size, abs=1e-12
    )
    with pytest.raises(UserError, match=f"sequence 0 has 40 tokens, and a row has {ROW}"):
        hvdtrain.evaluate(run, {"tokens": [np.ones(40, np.int64), np.ones(3, np.int64)]})


def _train(*words: str, **given: Any) -> Callable[[], Any]:
    data = {"tokens": tokens()}
    return lambda: hvdtrain.train(
        {"stop.steps": 1},
        *JOB,
        *words,
        **{"model": gpt(), "train_data": data, "val_data": data, **given},
    )


LANGUAGE = "task.name=language"
MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (
        _train(LANGUAGE, PACK, model=sequence_jobs.made(sequence_jobs.NextToken)),
        "tokens and segments to forward.. of NextToken",
    ),
    (_train(LANGUAGE, "data.pack=20"), "sequence 4 has 22 tokens, and a row has 20"),
    (
        _train(LANGUAGE, PACK, train_data={"tokens": [np.ones(1, np.int64), np.ones(0, np.int64)]}),
        "no training sequence has two tokens",
    ),
    (_train(PACK), "this is task.name=classification"),
    (_train(PACK, loss=sequence_jobs.loss_of_rows), "this job has a custom loss"),
    (
        _train(LANGUAGE, PACK, train_data={"x": np.ones((50, 3))}),
        "data.pad or data.pack names the field 'tokens', but the data only have x",
    ),
    (
        _train(LANGUAGE, PACK, train_data={"tokens": tokens(), "segments": np.ones(50)}),
        "the data have a field segments",
    ),
    (
        _train(LANGUAGE, PACK, train_data=Sequences([np.full(20, sequence_jobs.VOCABULARY)] * 13)),
        "has 11, expected 0 to 10",
    ),
    (_train(LANGUAGE, PACK, "data.pad={tokens: 0}"), "data.pack does not support data.pad="),
    (
        _train(LANGUAGE, PACK, "data.bucket_by=length"),
        "data.pack does not support data.bucket_by=length",
    ),
    (
        _train(LANGUAGE, PACK, "data.sample_weights=y"),
        "data.pack does not support data.sample_weights=y",
    ),
    (_train(LANGUAGE, PACK, "framework=jax"), "framework=jax does not support data.pack"),
    (_train(LANGUAGE, PACK, "recipe.warmup=200 tokens"), "tokens"),
    (
        lambda: hvdtrain.train({"data.name": "text"}, LANGUAGE, PACK),
        "all samples of data.name=text have the same",
    ),
    (lambda: hvdtrain.init(PACK), "data.pack"),
]


@pytest.mark.parametrize(("job", "text"), MISTAKES, ids=[text for _, text in MISTAKES])
def test_mistakes_are_told(job: Callable[[], Any], text: str) -> None:
    with pytest.raises(UserError, match=text) as caught:
        job()
    assert caught.value.fix and os.listdir() in ([], ["runs"])


def test_a_sequence_that_changes_its_length_is_told() -> None:
    data = Sequences([np.arange(3), np.arange(4)])
    source = source_of(data, 6)
    data.samples[1] = np.arange(2)
    with pytest.raises(
        UserError, match="sequence 1 has 2 tokens now, and had 4 when it was packed"
    ):
        source.read(np.array([1]))
