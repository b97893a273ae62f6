"""data.pad, data.mask and data.bucket_by: steps beside those of single samples without padding, on
1 and 2 ranks; what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sequence_jobs
import torch
from pool import alone
from ranks import mpirun, needs_extra, needs_mpirun
from sequence_jobs import JOB, PAD_ROWS, PAD_TOKENS, Sequences, made, tokens

import hvdtrain
from hvdtrain.config.read import configure
from hvdtrain.data.declared import bounded_alike
from hvdtrain.data.field import Field, Padding, field_of_facts
from hvdtrain.data.ragged import ragged
from hvdtrain.data.sampler import parts_by_length, parts_of_rank, positions_of_rank
from hvdtrain.data.source import NamedArrays
from hvdtrain.data.user_data.as_source import as_source
from hvdtrain.errors import UserError
from hvdtrain.tasks import language

PADDING = {"tokens": Padding(0, "tokens_mask")}


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_samples_are_padded_to_the_longest_that_is_read() -> None:
    samples = [np.array([3, 4, 5]), np.array([], np.int64), np.array([6])]
    source = as_source({"tokens": samples, "y": np.arange(3)}, "mine", "here", padding=PADDING)
    assert source.fields["tokens"] == Field("int64", (3,), 7, padding=Padding(0, "tokens_mask"))
    assert source.fields["tokens_mask"].is_mask and source.fields["y"] == Field("int64", ())
    batch = source.read(np.array([2, 0]))
    assert batch["tokens"].tolist() == [[6, 0, 0], [3, 4, 5]] and batch["y"].tolist() == [2, 0]
    assert batch["tokens_mask"].tolist() == [[True, False, False], [True] * 3]
    # two tokens at least: one is read, one predicted
    assert source.read(np.array([1, 2]))["tokens"].tolist() == [
        [0, 0],
        [6, 0],
    ]
    assert source.read(np.array([], np.int64))["tokens"].shape == (0, 3)
    deep = ragged([np.ones((2, 3), np.float32), np.zeros((1, 3), np.float32)], "x", "here")
    assert deep.padded(np.array([1]), 2, -1.0)[0].tolist() == [[0.0] * 3, [-1.0] * 3]


@pytest.mark.in_turn
@needs_mpirun
def test_steps_are_those_of_samples_without_padding_on_ranks_and_resumed(tmp_path: Path) -> None:
    """A language, a loss of a script, a model that gets the mask, in one pass and by length; one
    process goes on where two stopped."""
    done = mpirun(2, alone("sequence_jobs:on_ranks", str(tmp_path)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "padded to the longest of each pass, similar lengths in one pass" in done.stdout
    expected = {"language": sequence_jobs.language_by_hand(), "rows": sequence_jobs.rows_by_hand()}
    if sequence_jobs.HAS_INPUTS:
        expected["sentences"] = sequence_jobs.sentences_by_hand()
    found = {
        name: dict(np.load(f"{name}.npz"))
        for name in sequence_jobs.WAYS
        if name not in ("language-stopped", "sentences-stage")
    }
    found["language-alone"] = sequence_jobs.language("one")
    found["rows-own-loop-alone"] = sequence_jobs.own_loop("")
    found["language-dataset"] = sequence_jobs.language(
        "dataset", "batch.micro=5", "data.bucket_by=length", of=Sequences
    )
    found["language-resumed"] = sequence_jobs.language(
        "language-stopped", "batch.micro=3", "data.bucket_by=length"
    )
    found["rows-alone"] = sequence_jobs.of_rows(
        "rows-one", "batch.micro=5", "data.bucket_by=length"
    )
    for name, weights in found.items():
        for key, array in expected[name.partition("-")[0]].items():
            np.testing.assert_allclose(
                weights[key], array, rtol=0, atol=1e-12, err_msg=f"{name} {key}"
            )
    if sequence_jobs.HAS_INPUTS:
        small = sequence_jobs.of_sentences("small", "batch.size=3", "batch.micro=1", "stop.steps=3")
        for key, array in np.load(
            "sentences-stage.npz"
        ).items():  # one of the ranks has a pass without samples
            np.testing.assert_allclose(small[key], array, rtol=0, atol=1e-12)
    first = dict(made(sequence_jobs.NextToken).named_parameters())["head.weight"].detach().numpy()
    assert np.abs(expected["language"]["head.weight"] - first).max() > 1e-2


def test_the_loss_is_that_of_samples_padded_to_the_longest_of_the_data() -> None:
    """Whole rows with a token more, which task.ignore leaves out: the numbers of the library before
    samples could differ."""
    longest = 24
    extra = sequence_jobs.VOCABULARY
    sets = [
        [np.pad(one, (0, longest - len(one)), constant_values=extra) for one in part]
        for part in (tokens(), tokens(20, 8))
    ]
    train, val = (NamedArrays({"tokens": np.array(rows)}, {"tokens": extra + 1}) for rows in sets)
    job = {"run": "longest", "stop.steps": sequence_jobs.STEPS, "task.name": "language"}
    words = [*JOB, f"task.ignore={extra}", "batch.micro=3"]
    whole = hvdtrain.train(
        job, *words, model=made(sequence_jobs.NextToken), train_data=train, val_data=val
    )
    padded = hvdtrain.train(
        {**job, "run": "padded"},
        *[*JOB, "batch.micro=3", PAD_TOKENS, "data.bucket_by=length"],
        model=made(sequence_jobs.NextToken),
        train_data={"tokens": tokens()},
        val_data={"tokens": tokens(20, 8)},
    )
    assert padded.last == pytest.approx(whole.last, abs=1e-12)
    for name, weight in whole.weights.items():
        np.testing.assert_allclose(padded.weights[name], weight, rtol=0, atol=1e-12)


@needs_extra("trained_models")
def test_evaluations_and_predictions_of_other_data() -> None:
    run = hvdtrain.train(
        {"run": "run", "max_steps": 3, "task.name": "language"},
        *[*JOB, PAD_TOKENS],
        model=(model := made(sequence_jobs.NextToken)),
        train_data={"tokens": tokens()},
        val_data={"tokens": tokens(20, 8)},
    )
    others = [one[:15] for one in tokens(9, 4)]
    outputs = hvdtrain.predict(run, {"tokens": others}, "batch.evaluate=2")
    total = count = 0.0
    for row, one in zip(outputs, others, strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(one)[None, :-1])[0]
        np.testing.assert_allclose(row[: len(one) - 1], logits.numpy(), rtol=0, atol=1e-12)
        total += float(
            torch.nn.functional.cross_entropy(logits, torch.from_numpy(one[1:]), reduction="sum")
        )
        count += len(one) - 1
    assert hvdtrain.evaluate(run, {"tokens": others}, "batch.evaluate=2")["loss"] == pytest.approx(
        total / count, abs=1e-12
    )
    with pytest.raises(
        UserError,
        match=r"the model takes tokens int64 \(up to 23\) below 11, the data have it as int64 "
        r"\(up to 40\)",
    ):
        hvdtrain.evaluate(run, {"tokens": [np.ones(40, np.int64), np.ones(3, np.int64)]})


def test_a_model_is_made_for_the_longest_of_both_sets() -> None:
    words = [*JOB, PAD_TOKENS, "model.name=gpt", "model.layers=1", "model.heads=1", "model.width=4"]
    longer = {"tokens": [*tokens(5, 8), np.full(40, sequence_jobs.VOCABULARY)]}
    job = {"stop.steps": 1, "task.name": "language"}
    weights = hvdtrain.train(job, *words, train_data={"tokens": tokens()}, val_data=longer).weights
    assert weights["positions.weight"].shape == (39, 4) and weights["tokens.weight"].shape == (
        sequence_jobs.VOCABULARY + 1,
        4,
    )


def test_a_loss_of_torch_leaves_padded_targets_out() -> None:
    """CrossEntropyLoss() over (n, classes, T), whose ignore_index is what y is padded with."""

    class Classes(sequence_jobs.NextToken):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).transpose(1, 2)

    samples = tokens()
    data = {"x": samples, "y": [(one + 1) % sequence_jobs.VOCABULARY for one in samples]}
    loss = torch.nn.CrossEntropyLoss()
    words = [*JOB, "data.pad={x: 0, y: -100}", "batch.micro=5"]
    run = hvdtrain.train(
        {"max_steps": 9}, *words, model=made(Classes), train_data=data, val_data=data, loss=loss
    )

    def by_hand(model: torch.nn.Module, sample: int) -> tuple[torch.Tensor, int]:
        x, y = (torch.from_numpy(data[name][sample]) for name in ("x", "y"))
        return torch.nn.functional.cross_entropy(model(x[None]), y[None], reduction="sum"), len(y)

    for name, weight in sequence_jobs.by_hand(made(Classes), by_hand).items():
        np.testing.assert_allclose(run.weights[name], weight, rtol=0, atol=1e-12)


@pytest.mark.in_turn
@pytest.mark.parametrize("workers", [0, 1])
def test_datasets_are_padded_as_arrays_are(workers: int) -> None:
    of_arrays = as_source({"tokens": tokens()}, "mine", "here", padding=PADDING)
    source = as_source(Sequences(tokens()), "mine", "here", workers, padding=PADDING)
    assert source.fields == of_arrays.fields
    indices = np.array([7, 3, 40, 7])
    for name, array in of_arrays.read(indices).items():
        np.testing.assert_array_equal(source.read(indices)[name], array)
    lengths: Any = source
    assert lengths.known_lengths("tokens").tolist() == [len(one) for one in tokens()]
    wide, _ = bounded_alike(
        source, as_source({"tokens": [np.arange(50)]}, "mine", "here", padding=PADDING)
    )
    assert wide.fields["tokens"].shape == (50,) and wide.fields["tokens"].values == 50
    assert wide.read(indices)["tokens"].shape == source.read(indices)["tokens"].shape
    getattr(source, "_pool", None) and source._pool.close()  # type: ignore[attr-defined]


def test_a_dataset_may_tell_its_lengths() -> None:
    class Told(Sequences):
        lengths = np.array([len(one) for one in tokens()])

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            read.append(index)
            return super().__getitem__(index)

    read: list[int] = []
    source = as_source(Told(tokens()), "mine", "here", padding=PADDING)
    assert len(set(read)) <= 2 and source.fields["tokens"].shape == (23,)
    Told.lengths = Told.lengths // 2
    with pytest.raises(
        UserError,
        match=r"sample \d+ of mine has \d+ rows of tokens, but the longest sample had "
        "11",
    ):
        as_source(Told(tokens()), "mine", "here", padding=PADDING).read(np.arange(50))
    Told.lengths = Told.lengths[:4]
    with pytest.raises(
        UserError, match=r"`lengths` of mine has int64 \(4,\) for tokens, but there are 50 samples"
    ):
        as_source(Told(tokens()), "mine", "here", padding=PADDING)


def test_lists_of_a_hugging_face_dataset() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict(
        {"tokens": [one.tolist() for one in tokens()], "label": list(range(50))}
    )
    source = as_source(table, "mine", "here", padding=PADDING)
    expected = as_source({"tokens": tokens()}, "mine", "here", padding=PADDING).read(np.arange(9))
    found = source.read(np.arange(9))
    assert found["tokens"].tolist() == expected["tokens"].tolist() and found["y"].tolist() == list(
        range(9)
    )
    with pytest.raises(UserError, match="has lists of 1 to 23 numbers") as caught:
        as_source(table, "mine", "here")
    assert "data.pad={tokens: 0}" in caught.value.fix


@pytest.mark.parametrize("size", [1, 2, 3])
def test_buckets_have_the_samples_of_the_step(size: int) -> None:
    lengths = np.array([len(one) for one in tokens(200)])
    for start, count, parts in ((0, 48, 4), (150, 101, 7), (3, 2, 1)):
        whole = positions_of_rank(start, count, 0, 1, 200, 1)
        usual = [parts_of_rank(start, count, parts, rank, size, 200, 1) for rank in range(size)]
        found = [parts_by_length(whole, lengths, parts, rank, size) for rank in range(size)]
        pairs = sorted(
            (int(s), int(e))
            for rank in found
            for part in rank
            for s, e in zip(part.samples, part.epochs, strict=True)
        )
        assert pairs == sorted(zip(whole.samples.tolist(), whole.epochs.tolist(), strict=True))
        counts = [
            sorted(tuple(len(part.samples) for part in rank) for rank in ranks)
            for ranks in (found, usual)
        ]
        assert counts[0] == counts[1]
        padded = [_padded(one, lengths) for one in (found, usual)]
        assert padded[0] <= padded[1] and (padded[0] < 0.8 * padded[1] or parts == 1)


def _padded(ranks: Sequence[Sequence[Any]], lengths: np.ndarray) -> int:
    """Rows of all passes, with their padding."""
    return sum(
        len(part.samples) * int(lengths[part.samples].max(initial=0))
        for rank in ranks
        for part in rank
    )


def test_facts_of_padded_fields() -> None:
    field = Field("int64", (9,), 4, ignored=-1, padding=Padding(-1, "m"))
    assert field_of_facts(field.facts()) == field and Field("float32", (3,)).facts() == [
        "float32",
        [3],
        0,
    ]
    for wrong in (
        ["int64", [9], 4, ["a", "m"]],
        ["int64", [], 4, [0, "m"]],
        ["int64", [9], 4, [0]],
        ["int64", [9], 4, [0, "m"], 1],
    ):
        with pytest.raises((TypeError, ValueError)):
            field_of_facts(wrong)
    source = as_source({"tokens": tokens()}, "mine", "here", padding=PADDING)
    task = language.build("language", source, source, "here", ignore=3)
    assert language.restore(task.facts()) == task and task.sample_weight is None
    batch = source.read(np.arange(5))
    assert task.weight(batch) == sum(int((one[1:] != 3).sum()) for one in tokens()[:5])


def test_the_configuration_has_mappings(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("data:\n  pad: {x: 0, y: -7}\n  mask:\n    y: real\n")
    of_file = configure("job.yaml", [])
    of_words = configure(None, PAD_ROWS)
    assert dict(of_file.data.pad) == dict(of_words.data.pad) == {
        "x": 0,
        "y": -7,
    } and of_file.data.mask == {"y": "real"}


def _train(*words: str, data: Any = None, **given: Any) -> Callable[[], Any]:
    def job() -> Any:
        found = {"tokens": tokens(), "y": np.zeros(50)} if data is None else data
        return hvdtrain.train(
            {"stop.steps": 1}, *JOB, *words, train_data=found, val_data=found, **given
        )

    return job


ROWS = {"x": sequence_jobs.rows()["x"], "y": np.zeros(50, np.int64)}
PAIRS = sequence_jobs.rows()
MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (_train("task.name=language"), r"samples of tokens of .* have 1 to 23 rows"),
    (
        _train("data.pad={token: 0}", data=ROWS | {"x": np.ones((50, 3))}),
        "the field 'token', but the data only have x, y",
    ),
    (_train(PAD_TOKENS, "data.mask={tokens: y}"), "the mask of tokens cannot be called 'y'"),
    (
        lambda: hvdtrain.train({"data.name": "digits"}, "data.mask={x: real}"),
        "data.mask needs your own data",
    ),
    (
        lambda: hvdtrain.train(
            {"task.name": "language"},
            PAD_TOKENS,
            train_data={"tokens": tokens()},
            val_data={"tokens": tokens(1)},
        ),
        "no validation sequence has two tokens",
    ),
    (
        _train(PAD_TOKENS, "data.mask={x: real}"),
        "data.mask has x, but data.pad does not",
    ),
    (_train("data.pad={tokens: .nan}"), r"data.pad is nan\n.*\n  fix: give a finite number"),
    (
        _train("data.pad={tokens: a}"),
        r"wrong value for data.pad: 'a'\n.*\n  fix: data.pad takes names, each with a number",
    ),
    (
        _train("data.pad={x: 0}", data=ROWS | {"x": []}),
        "data.pad has x of .*, which is an empty list",
    ),
    (_train("data.pad={tokens: 0.5}"), "data.pad has 0.5 for tokens, which is int64"),
    (_train("data.pad={y: 0, tokens: 0}"), r"data.pad has y of .*, which is an array \(50,\)"),
    (_train("data.pad={x: 0}", data=ROWS), "task.name=classification needs x of one length"),
    (
        _train("data.pad={x: 0}", data=ROWS, loss=sequence_jobs.loss_of_rows),
        "model.name=wide_resnet needs samples of one length",
    ),
    (
        _train(
            "data.pad={x: 0, y: 0}",
            data=PAIRS,
            model=torch.nn.Linear(3, 1),
            loss=torch.nn.MSELoss(),
        ),
        "treat the padding of y, 0, as",
    ),
    (
        _train(
            "data.pad={x: 0, y: 0}",
            data=PAIRS,
            model=torch.nn.Linear(3, 1),
            loss=torch.nn.CrossEntropyLoss(),
        ),
        "treat the padding of y",
    ),
    (
        _train(
            "data.pad={x: 0, y: 0}", "task.name=regression", data=PAIRS, model=torch.nn.Linear(3, 1)
        ),
        "needs [xy] of one length",
    ),
    (
        _train("data.pad={x: 0}", "task.name=regression", data=ROWS, model=torch.nn.Linear(3, 1)),
        "needs x of one length",
    ),
    (
        _train(
            "data.pad={x: 0}",
            "task.standardize=true",
            data=ROWS,
            model=torch.nn.Linear(3, 2),
            loss=sequence_jobs.loss_of_rows,
        ),
        "whose mean and deviation would include the padding",
    ),
    (
        _train(PAD_TOKENS, "framework=jax", "task.name=language"),
        "framework=jax does not support data.pad",
    ),
    (
        _train(PAD_TOKENS, "data.bucket_by=length", "data.sampling=partition"),
        "data.bucket_by=length divides the samples of a step by their lengths",
    ),
    (_train("data.bucket_by=length"), "data.bucket_by=length .* needs data.pad"),
    (
        _train(PAD_TOKENS, "task.name=language", "data.bucket_by=y", "model.name=gpt"),
        "data.bucket_by=y is not a variable-length field",
    ),
    (
        _train(PAD_TOKENS, "recipe.warmup=200 tokens", "task.name=language", "model.name=gpt"),
        "tokens",
    ),
    (
        _train(
            "data.pad={x: 0}",
            data=[(np.ones(3), 1), (np.ones((2, 2)), 1)],
            model=torch.nn.Linear(1, 1),
        ),
        "has x as float64",
    ),
    (
        lambda: hvdtrain.train({"data.name": "digits"}, "data.pad={x: 0}"),
        "all samples of data.name=digits have the same",
    ),
    (
        lambda: hvdtrain.init("data.pad={x: 0}", "data.bucket_by=length"),
        "data.bucket_by is not supported in a custom loop",
    ),
    (
        lambda: hvdtrain.init("data.pad={x: 0}", "framework=jax"),
        "framework=jax does not support data.pad={x: 0}",
    ),
]


@pytest.mark.parametrize(("job", "text"), MISTAKES, ids=[text for _, text in MISTAKES])
def test_mistakes_are_told(job: Callable[[], Any], text: str) -> None:
    with pytest.raises(UserError, match=text) as caught:
        job()
    assert caught.value.fix and os.listdir() in ([], ["runs"])
