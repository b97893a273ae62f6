"""log.trust_ratios: the factors of each layer's learning rate, beside those that follow from the
weights and gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_threads import in_threads

from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper
from hvdtrain.extras.trust_ratios.gauge import trust_ratio_gauge
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

JOB = [
    *("data.name=synthetic", "data.samples=64", "data.val_samples=8", "model.name=mlp"),
    *(
        "model.widths=[8]",
        "data.shape=[4,4,1]",
        "batch.size=16",
        "log.every_steps=2",
        "max_steps=5",
    ),
]


class Events:
    """Keeps emitted events."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, dict[str, Any]]] = []

    def emit(self, kind: str, step: int, **fields: Any) -> None:
        self.found.append((kind, step, fields))


def test_the_ratios_of_lars_are_those_of_its_formula_on_shards_too() -> None:
    """a = trust |p| / (|g| + d |p|), where p is from before the step and g from plain torch."""
    task = Classification((4, 4, 1), 3, np.array([0.4]), np.array([0.2]))
    words = [*JOB[3:5], "optim.name=lars", "optim.trust=0.01", "speed.precision=fp64"]
    hyper = Hyper(lr=0.1, momentum=0.9, weight_decay=0.01, batch=8, step=0)
    rng = np.random.default_rng(1)
    batch = {"x": rng.integers(0, 256, (8, 4, 4, 1), dtype=np.uint8), "y": rng.integers(0, 3, 8)}
    first = build_learner(configure(None, words), task, SingleProcessCommunicator()).state()

    def ratios(rank: Communicator, *more: str) -> Any:
        learner: Any = build_learner(configure(None, [*words, *more]), task, rank)
        learner.load(first)
        log: Any = Events()
        gauge = trust_ratio_gauge(configure(None, words), rank, learner, log, None, 4)
        share = slice(rank.rank * 8 // rank.size, (rank.rank + 1) * 8 // rank.size)
        mine = {name: array[share] for name, array in batch.items()}
        learner.step([learner.to_device(mine)], hyper, 1)
        assert gauge.fields({}, 3) == {}
        ((kind, step, fields),) = log.found
        assert (kind, step) == ("trust_ratios", 7)
        return fields["ratios"]

    x = torch.tensor((batch["x"] / 255 - 0.4) / 0.2).flatten(1)
    weights = {
        name.removeprefix("p."): torch.tensor(array, requires_grad=True)
        for name, array in first.items()
        if name.startswith("p.")
    }
    layers = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    for number, layer in enumerate(layers):
        x = x.relu() if number else x
        x = x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
    torch.nn.functional.cross_entropy(x, torch.tensor(batch["y"])).backward()
    expected = {}
    for layer in layers:
        p = weights[f"{layer}.weight"]
        assert p.grad is not None
        norm = p.detach().norm()
        expected[f"{layer}.weight"] = float(0.01 * norm / (p.grad.norm() + 0.01 * norm))
    for found in (
        ratios(SingleProcessCommunicator()),
        *in_threads(2, ratios),
        *in_threads(2, lambda rank: ratios(rank, "shard.stage=2")),
    ):
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("words", ["lars", "larc", "lamb"])
def test_a_job_logs_its_ratios_and_computes_the_same(words: str, tmp_path: Path) -> None:
    results = []
    for name in ("with", "without"):
        job = [*JOB, f"run={tmp_path / name}", f"optim.name={words}"]
        assert main([*job, *["log.trust_ratios=true"] * (name == "with")]) == 0
        lines = (tmp_path / name / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        results.append([event["loss"] for event in events if event["kind"] == "step"])
        found = [event for event in events if event["kind"] == "trust_ratios"]
        assert [event["step"] for event in found] == ([2, 4, 5] if name == "with" else [])
        for event in found:
            assert all(name.endswith(".weight") for name in event["ratios"])
            assert len(event["ratios"]) == 2 and all(r > 0 for r in event["ratios"].values())
    assert results[0] == results[1]
    assert main(["report", str(tmp_path / "with")]) == 0
    page = (tmp_path / "with/report.html").read_text()
    assert "Trust ratios: factors of each layer" in page


def test_an_optimizer_without_ratios_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "optim.name=sgd", "log.trust_ratios=true"]) == 2
    assert "optim.name=sgd has no trust ratios" in capsys.readouterr().err
