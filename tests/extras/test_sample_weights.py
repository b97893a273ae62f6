"""data.sample_weights: draws beside numpy's, the same on any number of ranks and resumed, and what
is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stored_data
import torch
import weighted_jobs
from pool import alone
from ranks import mpirun, needs_mpirun

import hvdtrain
from hvdtrain.config.read import configure
from hvdtrain.config.sections.section import Given
from hvdtrain.core.extras import archives
from hvdtrain.core.progress import fold
from hvdtrain.data.configured.split import divide
from hvdtrain.data.field import Padding
from hvdtrain.data.sampler import WeightedDraws, parts_of_rank, positions_of_rank
from hvdtrain.data.source import NamedArrays
from hvdtrain.data.user_data.as_source import as_source
from hvdtrain.errors import UserError
from hvdtrain.extras.sample_weights.weights import draws_of, read_weights


def expected(weights: np.ndarray, seed: int, positions: range) -> list[int]:
    """Each draw by a loop over the samples, as its contract says it."""
    found = []
    for position in positions:
        share = (
            (fold(seed, 0x647261777321, position) >> 11)
            / 2**53
            * float(np.cumsum(weights / weights.max())[-1])
        )
        below = 0.0
        for sample, weight in enumerate(weights / weights.max()):
            below += weight
            if share < below:
                found.append(sample)
                break
    return found


@pytest.mark.parametrize(
    "weights",
    [
        np.array([0.0, 1.0, 3.0, 0.0, 2.0, 0.0]),
        np.array([1e308, 1e308, 0, 5e307]),
        np.array([0, 0, 5]),
    ],
)
def test_draws_are_in_proportion_to_the_weights(weights: np.ndarray) -> None:
    draws = WeightedDraws(weights)
    count = 40_000
    found = draws.positions(17, count, len(weights), 5)
    assert found.samples[:400].tolist() == expected(weights, 5, range(17, 417))
    assert found.epochs.tolist() == list(range(17, 17 + count))  # random numbers of their own
    shares = np.bincount(found.samples, minlength=len(weights)) / count
    wanted = weights / weights.max() / (weights / weights.max()).sum()
    np.testing.assert_allclose(shares, wanted, atol=4 * np.sqrt(0.25 / count))
    assert not shares[weights == 0].any()
    pairs = np.corrcoef(found.samples[:-1], found.samples[1:])[0, 1] if (wanted < 1).all() else 0.0
    assert abs(pairs) < 0.02  # one draw says nothing of the next


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_together_have_the_draws_of_one(size: int) -> None:
    draws = WeightedDraws(weighted_jobs.data()["weight"])
    for start, count, parts in ((0, 13, 1), (55, 20, 3), (10**12, 2, 1)):
        whole = positions_of_rank(start, count, 0, 1, weighted_jobs.SAMPLES, 1, shuffle=draws)
        assert (
            whole.samples.tolist()
            == draws.positions(start, count, weighted_jobs.SAMPLES, 1).samples.tolist()
        )
        shares = [
            parts_of_rank(start, count, parts, rank, size, weighted_jobs.SAMPLES, 1, shuffle=draws)
            for rank in range(size)
        ]
        found = [int(e) for share in shares for part in share for e in part.epochs]
        assert sorted(found) == whole.epochs.tolist()
        drawn = {
            int(e): int(s)
            for share in shares
            for part in share
            for s, e in zip(part.samples, part.epochs, strict=True)
        }
        assert [drawn[position] for position in whole.epochs.tolist()] == whole.samples.tolist()


@pytest.mark.in_turn
@needs_mpirun
def test_a_job_is_the_same_on_ranks_and_resumed_on_another_number(tmp_path: Path) -> None:
    """On two ranks; and the job that they stopped goes on in one process."""
    field, classes = (
        weighted_jobs.trained(tmp_path / f"one-{kind}", kind) for kind in ("weight", "balanced")
    )
    done = mpirun(2, alone("weighted_jobs:on_ranks", str(tmp_path)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "drawn with replacement by weights, data.sample_weights=balanced" in done.stdout
    for name, wanted in (("classes", classes), ("array", field)):
        found = np.load(tmp_path / f"{name}.npz")
        for key in wanted:
            np.testing.assert_allclose(
                found[key], wanted[key], rtol=0, atol=1e-12, err_msg=f"{name} {key}"
            )
    resumed = weighted_jobs.trained(tmp_path / "field", "weight")
    for key in field:
        np.testing.assert_allclose(resumed[key], field[key], rtol=0, atol=1e-12)
    assert np.abs(field["fc.weight"] - classes["fc.weight"]).max() > 1e-3
    with pytest.raises(
        UserError,
        match=r"another data.shuffle: 'data.sample_weights \w+', "
        "but this job has 'data.sample_weights",
    ):
        weighted_jobs.trained(tmp_path / "field", "balanced", "stop.steps=12")
    with pytest.raises(UserError, match="another data.shuffle"):
        weighted_jobs.trained(tmp_path / "field", None, "stop.steps=12", "data.sample_weights=null")


def test_balanced_weights_are_of_classes_and_of_parts() -> None:
    data = weighted_jobs.data()
    source = NamedArrays({**data, "y": np.where(np.arange(60) < 5, -100, data["y"])})
    weights = read_weights(source, "balanced", -100, "here")
    labels = source.arrays["y"]
    assert {
        int(label): float(weights[labels == label].sum()) for label in np.unique(labels)
    } == pytest.approx({-100: 0.0, 0: 1.0, 1: 1.0})
    part = divide(NamedArrays(data), 0.2).train
    rows = np.array(
        [
            int(np.flatnonzero((data["x"] == x).all(1))[0])
            for x in part.read(np.arange(len(part)))["x"]
        ]
    )
    assert read_weights(part, "weight", None, "here").tolist() == data["weight"][rows].tolist()
    lists = {
        "x": [one[: 1 + number % 4] for number, one in enumerate(data["x"])],
        "weight": data["weight"],
    }
    of_lists = divide(
        as_source(lists, "mine", "here", padding={"x": Padding(0, "mask")}), 0.2
    ).train
    assert (
        read_weights(of_lists, "weight", None, "here").tolist()
        == data["weight"][of_lists.indices].tolist()
    )  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="the field x is known only once samples are read"):
        read_weights(of_lists, "x", None, "here")


@pytest.mark.skipif(".npz" not in archives(), reason="this copy reads no .npz")
def test_a_field_of_a_file_has_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = stored_data.samples()
    weight = np.linspace(0, 1, stored_data.SAMPLES)
    np.savez("weighted.npz", **data, w=weight)
    words = [
        "data.name=npz",
        "data.root=weighted.npz",
        "data.fields={x: x, y: y, w: w}",
        "data.sample_weights=w",
    ]
    of_file = hvdtrain.train(stored_data.JOB, "run=file", *words).weights
    of_array = hvdtrain.train(
        stored_data.JOB, "run=array", "data.sample_weights=w", train_data={**data, "w": weight}
    ).weights
    assert stored_data.bits(of_file) == stored_data.bits(of_array)


def _with(**changes: Any) -> Callable[[], Any]:
    def job() -> Any:
        words = changes.get("words", [])
        data = weighted_jobs.data() | changes.get("data", {})
        weights = changes.get("weights", "weight")
        return hvdtrain.train(
            {}, *weighted_jobs.JOB, *words, train_data=data, val_data=data, sample_weights=weights
        )

    return job


MISTAKES = [
    (_with(weights="wait"), "the data have no field 'wait': they have x, y, weight"),
    (_with(weights=-weighted_jobs.data()["weight"]), "the weight of sample 1 is -0."),
    (_with(weights=np.full(60, np.nan)), "the weight of sample 0 is nan"),
    (_with(weights=np.zeros(60)), "all weights are 0"),
    (_with(weights=np.ones(59)), r"weights are float64 \(59,\), but there are 60 training samples"),
    (_with(weights=3), "sample_weights is a int"),
    (_with(weights="x"), r"weights are float64 \(60, 4\)"),
    (
        _with(weights="balanced", words=["task.name=regression"], data={"y": np.ones((60, 2))}),
        "balanced needs classes: y is float64",
    ),
    (
        _with(words=["data.shuffle=blocks"]),
        "data.sample_weights draws with replacement and does not support data.shuffle=blocks",
    ),
    (_with(words=["data.sampling=partition"]), "does not support data.sampling=partition"),
    (_with(words=["augment.mixup=0.2"]), "does not support augment.mixup=0.2"),
    (_with(words=["augment.cutmix=0.2"]), "does not support augment.cutmix=0.2"),
    (_with(words=["augment.flip=alternating"]), "does not support augment.flip=alternating"),
    (_with(words=["recipe.sample_noise=0.5", "optim.base_batch=6"]), "recipe.sample_noise=0.5"),
    (lambda: hvdtrain.train({"val_data": 1}, sample_weights=np.ones(3)), "train_data is not given"),
    (
        lambda: hvdtrain.train(
            {}, "data.val_share=0.1", train_data=weighted_jobs.data(), sample_weights=np.ones(60)
        ),
        "but data.val_share=0.1 chooses",
    ),
    (
        lambda: hvdtrain.init("data.sample_weights=balanced"),
        "data.sample_weights is not supported in a custom loop",
    ),
]


@pytest.mark.parametrize(("job", "text"), MISTAKES, ids=[text for _, text in MISTAKES])
def test_mistakes_are_told(
    job: Callable[[], Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=text) as caught:
        job()
    assert caught.value.fix


def test_weights_with_a_loss_of_a_script(tmp_path: Path) -> None:
    """A field as an array; classes without the label that a loss of torch ignores."""
    data = weighted_jobs.data()
    nets = [torch.nn.Linear(4, 2, dtype=torch.float64) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    for net, weights in zip(nets, ("weight", data["weight"]), strict=True):
        words = ["stop.steps=3", *weighted_jobs.JOB[1:], f"run={tmp_path / type(weights).__name__}"]
        loss = torch.nn.CrossEntropyLoss()
        hvdtrain.train(
            {}, *words, model=net, loss=loss, train_data=data, val_data=data, sample_weights=weights
        )
    assert torch.equal(nets[0].weight, nets[1].weight)
    data["y"][5] = 1
    config = configure(None, ["data.sample_weights=balanced"])
    given = Given("<object of here:loss>", len, {"loss": torch.nn.CrossEntropyLoss(ignore_index=1)})
    config = config.replace(task=config.task.replace(name=given.name).with_given(given))
    draws = draws_of(config, NamedArrays(data))
    assert draws is not None and set(draws.weights[data["y"] == 1]) == {0.0}
