"""What a job says of padded samples beside what is said of each alone: next tokens, metrics,
inputs; and what would count padding."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sequence_jobs
import torch
from ranks import needs_extra
from sequence_jobs import JOB, PAD_TOKENS, made, tokens

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.errors import UserError
from hvdtrain.training import model_inputs

OF_MODULE = """
import numpy as np, torch
from sequence_jobs import tokens

def sequences(split):
    return {"tokens": tokens(20, 8)}

class SaysWhatItRead(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = torch.nn.Embedding.from_pretrained(10 * torch.eye(11), freeze=False)
    def forward(self, tokens):
        return self.scores(tokens)
class SaysWhatItReadOfRows(SaysWhatItRead):
    def forward(self, tokens, segments):
        return self.scores(tokens)
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@needs_extra("packing")
def test_buckets_of_one_pass_have_no_effect_and_the_header_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, text in (
        ([], "(data.bucket_by has no effect: a step is one pass"),
        (["batch.micro=5"], "similar lengths in one pass"),
    ):
        sequence_jobs.language(f"run-{len(words)}", "data.bucket_by=length", "stop.steps=1", *words)
        assert text in capsys.readouterr().out


@needs_extra("predict")
@pytest.mark.parametrize(
    ("key", "model"), [(PAD_TOKENS, "SaysWhatItRead"), ("data.pack=24", "SaysWhatItReadOfRows")]
)
def test_predict_says_the_last_token_of_each_sequence(key: str, model: str) -> None:
    Path("module_of_padding.py").write_text(OF_MODULE)
    model = f"model.name=module_of_padding:{model}"
    words = ["task.name=language", key, model, "data.name=module_of_padding:sequences"]
    assert main([*JOB, *words, "batch.size=4", "optim.base_lr=0", "stop.steps=1", "run=run"]) == 0
    asked = ["--data", "module_of_padding:sequences", "--to", "said.csv", model]
    assert main(["predict", "run", *asked, "batch.evaluate=7"]) == 0
    with Path("said.csv").open(newline="") as file:
        said = [int(row[1]) for row in list(csv.reader(file))[1:]]
    # of a sequence of one token the one after it
    assert said == [int(one[max(len(one) - 2, 0)]) for one in tokens(20, 8)]


@pytest.mark.parametrize("padding", [-1, -100])
def test_padding_below_0_is_no_token_of_an_embedding(padding: int) -> None:
    data: dict[str, Any] = {
        "train_data": {"tokens": tokens()},
        "val_data": {"tokens": tokens(20, 8)},
    }
    job = {
        "stop.steps": sequence_jobs.STEPS,
        "task.name": "language",
        "data.pad": {"tokens": padding},
    }
    weights = hvdtrain.train(
        job, *JOB, "batch.micro=5", model=made(sequence_jobs.NextToken), **data
    ).weights
    for name, weight in sequence_jobs.language_by_hand().items():
        np.testing.assert_allclose(weights[name], weight, rtol=0, atol=1e-12)


class TwoClasses(torch.nn.Module):
    """Scores (n, 2, T) of each token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.nn.Embedding(sequence_jobs.VOCABULARY, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.scores(tokens).transpose(1, 2)


@needs_extra("torchmetrics")
def test_a_metric_of_a_library_counts_no_padding() -> None:
    """Accuracy of all tokens by ignore_index and by rows that a function chooses, beside that by
    hand; without them it is refused."""

    def data(found: list[np.ndarray]) -> dict[str, Any]:
        return {"x": found, "y": [one % 2 for one in found]}

    def of_real(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return outputs.movedim(1, 2)[batch["y_mask"]], batch["y"][batch["y_mask"]]

    def job(**metrics: Any) -> Any:
        words = ["data.pad={x: 0, y: -100}", "batch.evaluate=7", "stop.steps=3", "run=metrics"]
        loss = torch.nn.CrossEntropyLoss()
        val = data(tokens(20, 8))
        given = {
            "train_data": data(tokens()),
            "val_data": val,
            "model": made(TwoClasses),
            "loss": loss,
            "metrics": metrics,
        }
        return hvdtrain.train({}, *JOB, *words, **given)

    import_torchvision()  # torchmetrics imports it
    torchmetrics = pytest.importorskip("torchmetrics")
    accuracy = torchmetrics.classification.MulticlassAccuracy
    f1 = torchmetrics.classification.BinaryAUROC
    for metric, inputs in (
        (accuracy(2, average="micro"), ()),
        (accuracy(2, ignore_index=0), ()),
        (f1(), ()),
    ):
        with pytest.raises(
            UserError, match=r"metric of: \w+ would treat the padding of y, -100, as targets"
        ) as caught:
            job(of=(metric, "max", *inputs))
        assert "batch['y_mask']" in caught.value.fix
    run = job(
        ignored=(accuracy(2, average="micro", ignore_index=-100), "max"),
        chosen=(accuracy(2, average="micro"), "max", of_real),
    )
    whole = np.concatenate(tokens(20, 8))
    by_hand = (run.weights["scores.weight"].argmax(1)[whole] == whole % 2).mean()
    events = map(json.loads, Path("metrics/events.jsonl").read_text().splitlines())
    last = [event for event in events if event["kind"] == "epoch"][-1]
    # the library divides in float32
    assert last["val_ignored"] == last["val_chosen"] == pytest.approx(by_hand, rel=1e-6)


class MayGetAMask(sequence_jobs.OfSentence):
    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(
            tokens, torch.ones(tokens.shape, dtype=torch.bool) if mask is None else mask
        )


class MayGetAMaskOfX(MayGetAMask):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, mask)


@needs_extra("several_inputs")
@pytest.mark.parametrize(("name", "kind"), [("tokens", MayGetAMask), ("x", MayGetAMaskOfX)])
def test_a_mask_goes_to_a_parameter_that_has_a_default(
    name: str, kind: type[torch.nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    def job(mask: str) -> Any:
        train, val = (
            {name: one["tokens"], "y": one["y"]}
            for one in (sequence_jobs.sentences(), sequence_jobs.sentences(20, 8))
        )
        words: dict[str, Any] = {
            "stop.steps": sequence_jobs.STEPS,
            "data.pad": {name: 0},
            "data.mask": {name: mask},
        }
        loss = torch.nn.CrossEntropyLoss()
        run = hvdtrain.train(
            words | {"run": mask},
            *JOB,
            "batch.micro=5",
            model=made(kind),
            train_data=train,
            val_data=val,
            loss=loss,
        )
        return run.weights, capsys.readouterr().out

    weights, header = job("mask")
    assert "does not get" not in header
    for key, weight in sequence_jobs.sentences_by_hand().items():
        np.testing.assert_allclose(weights[key], weight, rtol=0, atol=1e-12)
    assert (
        f"the model does not get real, and sees padding; forward(self, {name}, real) gets it"
        in job("real")[1]
    )


def test_without_the_extra_a_model_gets_only_x(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_inputs, "implementation", lambda name: None)
    loss = torch.nn.CrossEntropyLoss()

    def error(data: dict[str, Any], kind: type[torch.nn.Module], *words: str) -> UserError:
        with pytest.raises(UserError) as caught:
            hvdtrain.train(
                *JOB, *words, model=made(kind), train_data=data, val_data=data, loss=loss
            )
        return caught.value

    sentences = sequence_jobs.sentences()
    words = [PAD_TOKENS, "data.mask={tokens: mask}", "stop.steps=1"]
    refused = error(sentences, sequence_jobs.OfSentence, *words)
    assert refused.what.endswith(
        "takes tokens, mask, but this copy of hvdtrain has no extra that does data.inputs"
    )
    assert refused.where.startswith("model.name")
    assert refused.fix == "a model that only takes x; `hvdtrain extras` lists the installed extras"
    two = {
        "a": np.ones((4, 2), np.float32),
        "b": np.ones((4, 2), np.float32),
        "y": np.arange(4) % 2,
    }
    assert error(two, MayGetAMaskOfX).fix == "one field x"
    data = {"x": sentences["tokens"], "y": sentences["y"]}
    words = ["data.pad={x: 0}", "data.mask={x: real}", "stop.steps=1"]
    given = {"model": made(MayGetAMaskOfX), "train_data": data, "val_data": data, "loss": loss}
    hvdtrain.train(*JOB, *words, **given)
    assert "the model does not get real, and sees padding\n" in capsys.readouterr().out


@needs_extra("trained_models")
def test_what_a_run_is_asked_has_any_length_and_no_masks() -> None:
    data = sequence_jobs.sentences()
    keys: dict[str, Any] = {
        "stop.steps": 1,
        "data.pad": {"tokens": 0},
        "data.mask": {"tokens": "mask"},
    }
    run = hvdtrain.train(
        keys, *JOB, model=made(sequence_jobs.OfSentence), train_data=data, val_data=data
    )
    rows = {"tokens": np.ones((2, 4), np.int64), "mask": np.ones((2, 4), bool)}
    assert {name: array.tolist() for name, array in run.transform(rows).items()} == {
        name: rows[name].tolist() for name in rows
    }
    with pytest.raises(
        UserError,
        match=r"x is int64 \(2, 24\), but the model was trained on rows of int64 \(up to 23\)",
    ) as caught:
        run.transform(rows | {"tokens": np.ones((2, 24), np.int64)})
    assert caught.value.fix == "an array (n, 1 to 23)"
    with pytest.raises(
        UserError, match="the data have mask, but the mask is computed from the lengths of tokens"
    ):
        hvdtrain.predict(run, {"tokens": data["tokens"], "mask": rows["mask"]})
