"""What a framework computes on one rank: against hand-written gradients, against the rule, and
against itself in micro-batches."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import needs_extra, of_this_copy

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Batch, digest
from hvdtrain.core.progress import Hyper, fold
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Learner
from hvdtrain.frameworks.torch.inputs import DeviceBatch, Inputs
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

TASK = Classification((4, 4, 2), 3, np.array([0.4, 0.5]), np.array([0.2, 0.3]))


def learner(*words: str) -> Learner:
    config = configure(None, ["speed.precision=fp64", *words])
    return build_learner(config, TASK, SingleProcessCommunicator())


def batch(n: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return {"x": rng.integers(0, 256, (n, 4, 4, 2), dtype=np.uint8), "y": rng.integers(0, 3, n)}


def hyper(batch: int, lr: float = 0.1) -> Hyper:
    return Hyper(lr=lr, momentum=0.9, weight_decay=0.01, batch=batch)


def floats(sums: dict) -> dict[str, float]:
    return {name: float(value) for name, value in sums.items()}


def test_numpy_gradient_is_the_difference_quotient_of_its_loss() -> None:
    for loss in ("cross_entropy", "squared_error"):
        one = learner("framework=numpy", "model.name=linear", f"model.loss={loss}")
        data = one.to_device(batch(5))
        state = one.state()
        rng = np.random.default_rng(1)
        state["p.fc.weight"] = rng.normal(size=state["p.fc.weight"].shape)
        one.load(state)
        direction = rng.normal(size=state["p.fc.weight"].shape)
        sides = []
        for sign in (1, -1):
            one.load(state | {"p.fc.weight": state["p.fc.weight"] + sign * 1e-6 * direction})
            sides.append(one.evaluate(data)["loss"])
        one.load(state)
        one.step([data], Hyper(lr=1.0, momentum=0.0, weight_decay=0.0, batch=5), 0)
        gradient = state["p.fc.weight"] - one.state()["p.fc.weight"]
        assert (gradient * direction).sum() == pytest.approx(
            (sides[0] - sides[1]) / 2e-6 / 5, rel=1e-7
        )


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
def test_torch_and_numpy_move_alike(loss: str) -> None:
    both = [
        learner(f"framework={framework}", "model.name=linear", f"model.loss={loss}")
        for framework in ("torch", "numpy")
    ]
    for step in range(20):
        sums = [
            floats(one.step([one.to_device(batch(7, step))], hyper(7, lr=0.02 * (step + 1)), step))
            for one in both
        ]
        assert sums[0] == pytest.approx(sums[1], rel=1e-12)
    states = [one.state() for one in both]
    assert (
        states[0].keys()
        == states[1].keys()
        == {"p.fc.weight", "p.fc.bias", "s.fc.weight.0", "s.fc.bias.0"}
    )
    for name in states[0]:
        np.testing.assert_allclose(states[0][name], states[1][name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "words",
    [
        ["optim.clip_norm=0.3"],
        ["optim.clip_value=0.02"],
        ["model.label_smoothing=0.2"],
        ["optim.exclude=none"],
        ["model.label_smoothing=0.2", "model.loss=squared_error"],
        ["optim.name=larc"],
    ],
)
def test_options_mean_the_same_in_torch_and_numpy(words: list[str]) -> None:
    plain = learner("framework=numpy", "model.name=linear")
    both = [
        learner(f"framework={framework}", "model.name=linear", *words)
        for framework in ("torch", "numpy")
    ]
    for step in range(5):
        data = batch(7, step)
        weighted = data | {"w": np.linspace(-0.5, 2.0, 7)}
        plain.step([plain.to_device(data)], hyper(7), step)
        sums = [floats(one.step([one.to_device(weighted)], hyper(7), step)) for one in both]
        assert sums[0] == pytest.approx(sums[1], rel=1e-12)
    states = [one.state() for one in both]
    for name in states[0]:
        np.testing.assert_allclose(states[0][name], states[1][name], rtol=1e-11, atol=1e-13)
    assert not np.allclose(states[0]["p.fc.weight"], plain.state()["p.fc.weight"])


def test_a_model_of_the_users_may_view_its_images() -> None:
    one = learner("model.name=faulty:Views")
    one.step([one.to_device(batch(4))], hyper(4), 0)


@needs_extra("batch_norms")
def test_a_model_that_takes_no_empty_batch_is_refused_with_synchronized_norms() -> None:
    with pytest.raises(
        UserError, match=r"the model fails for images \(0, 2, 4, 4\): RuntimeError"
    ) as caught:
        learner("model.name=faulty:Views", "norm.kind=sync")
    assert "faulty.py:" in caught.value.where
    assert "norm.kind=sync may give a rank" in caught.value.fix


class Narrow(torch.nn.Module):
    """Its layer is too wide for the images, by one pixel."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(33, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.flatten(1))  # this line is named


def test_a_model_that_fails_is_shown_at_its_own_line() -> None:
    """Not at the line of torch's Linear, where the exception is raised."""
    with pytest.raises(
        UserError, match=r"the model fails for images \(2, 2, 4, 4\): RuntimeError: mat1 and mat2"
    ) as caught:
        learner(f"model.name={__name__}:Narrow")
    number = next(
        n
        for n, line in enumerate(Path(__file__).read_text().splitlines(), 1)
        if line.endswith("# this line is named")
    )
    assert caught.value.where.endswith(
        f"{__file__}:{number}: return self.fc(x.flatten(1))  # this line is named"
    )
    assert (
        caught.value.fix
        == "the model gets (n, 2, 4, 4): n images of 2 channels and 4x4 pixels; x.flatten(1) is "
        "(n, 32)"
    )


def test_label_smoothing_is_for_training_alone() -> None:
    one = learner("model.name=mlp", "model.label_smoothing=0.3")
    other = learner("model.name=mlp")
    data = one.to_device(batch(6))
    assert floats(one.evaluate(data)) == floats(other.evaluate(data))
    assert floats(one.step([data], hyper(6), 0))["loss"] != pytest.approx(
        floats(other.step([data], hyper(6), 0))["loss"], rel=1e-3
    )


def test_excluded_parameters_do_not_decay() -> None:
    one = learner("model.name=mlp")
    before = one.state()
    one.step([one.to_device(batch(0))], Hyper(lr=0.5, momentum=0.0, weight_decay=0.1, batch=4), 0)
    for name, array in one.state().items():
        if name.startswith("p."):
            np.testing.assert_allclose(
                array, before[name] * (0.95 if array.ndim > 1 else 1.0), rtol=1e-12
            )


def test_added_noise_is_drawn_from_the_seed() -> None:
    a, b, c = (learner("model.name=mlp") for _ in range(3))
    h = hyper(4)._replace(noise=0.01, momentum=0.0)
    for one, seed in ((a, 7), (b, 7), (c, 8)):
        one.step([one.to_device(batch(0))], h, seed)  # no sample: the gradient is noise alone
    assert digest(a.state()) == digest(b.state()) != digest(c.state())
    moved = (
        learner("model.name=mlp").state()["p.fc1.weight"] * (1 - 0.1 * 0.01)
        - a.state()["p.fc1.weight"]
    )
    assert moved.std() / 0.1 == pytest.approx(0.1, rel=0.05)


def test_a_torch_class_by_its_path_is_saved_and_continues() -> None:
    words = ["model.name=mlp", "optim.name=torch.optim.RMSprop", "optim.alpha=0.9"]
    a = learner(*words)
    assert not any(name.startswith("s.") for name in a.state()), (
        "its state comes with its first step"
    )
    for step in range(3):
        a.step([a.to_device(batch(8, step))], hyper(8, 0.001), step)
    assert "s.fc1.weight.square_avg" in a.state()
    b = learner(*words, "seed=2")
    b.load(a.state())
    for one in (a, b):
        one.step([one.to_device(batch(8, 9))], hyper(8, 0.001), 9)
    assert digest(a.state()) == digest(b.state())
    model = torch.nn.Sequential(
        *[torch.nn.Linear(*shape).double() for shape in ((32, 128), (128, 3))]
    )
    by_hand = torch.optim.RMSprop(model.parameters(), alpha=0.9)
    assert (
        by_hand.param_groups[0]["alpha"] == a.optimizer.param_groups[0]["alpha"]
        and len(a.optimizer.param_groups) == 2
    )


@pytest.mark.parametrize("reduce", ["auto", "bucket"])
def test_micro_batches_and_empty_ones_change_nothing(reduce: str) -> None:
    words = ["model.name=mlp", "model.widths=[5]", f"comm.reduce={reduce}", "comm.bucket_mb=0.001"]
    whole, pieces = learner(*words), learner(*words)
    for step in range(3):
        data = batch(9, step)
        cuts = [{"x": data["x"][a:b], "y": data["y"][a:b]} for a, b in ((0, 4), (4, 4), (4, 9))]
        a = floats(whole.step([whole.to_device(data)], hyper(9), 0))
        b = floats(pieces.step([pieces.to_device(cut) for cut in cuts], hyper(9), 0))
        assert a == pytest.approx(b, rel=1e-12)
        assert a["count"] == 9
    for name, array in whole.state().items():
        np.testing.assert_allclose(pieces.state()[name], array, rtol=1e-12, atol=1e-15)


def test_a_step_of_no_samples_only_decays() -> None:
    one = learner("model.name=wide_resnet", "model.widths=[4,4,4,4]", "optim.exclude=none")
    before = one.state()
    sums = one.step(
        [one.to_device(batch(0))], Hyper(lr=0.5, momentum=0.0, weight_decay=0.1, batch=4), 0
    )
    assert floats(sums) == {"loss": 0.0, "right": 0.0, "count": 0, "nonfinite": 0.0}
    for name, array in one.state().items():
        if name.startswith("p."):
            np.testing.assert_allclose(array, before[name] * (1 - 0.5 * 0.1), rtol=1e-12)
        elif name.startswith("b."):
            np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("reduce", ["auto", "bucket"])
def test_a_parameter_that_no_loss_reaches_counts_as_zero_gradient(reduce: str) -> None:
    one = learner("model.name=faulty:Faulty", f"comm.reduce={reduce}")
    before = one.state()["p.unused.weight"]
    one.step([one.to_device(batch(4))], Hyper(lr=0.5, momentum=0.9, weight_decay=0.1, batch=4), 0)
    np.testing.assert_allclose(one.state()["p.unused.weight"], before * 0.95, rtol=1e-12)


def test_dropout_is_seeded_by_the_step() -> None:
    words = ["model.name=mlp", "model.dropout=0.5"]
    a, b, c = learner(*words), learner(*words), learner(*words)
    data = batch(8)
    for one, seed in ((a, 7), (b, 7), (c, 8)):
        one.step([one.to_device(data)], hyper(8), seed)
    assert digest(a.state()) == digest(b.state()) != digest(c.state())


class Drops(torch.nn.Module):
    """Keeps what dropout has left of ones."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left = torch.nn.functional.dropout(x.new_ones(len(x), 64), 0.5, self.training)
        return self.fc(self.left)


class RankOf(SingleProcessCommunicator):
    """A rank of several, none of which waits for another."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


@pytest.mark.parametrize(
    ("reader", "stage", "tensor", "stream"),
    [(0, 0, 0, 0), (1, 0, 0, 1), (2, 0, 0, 2), (2, 0, 1, 2), (0, 1, 0, 3), (2, 1, 0, 5)],
)
def test_ranks_drop_other_activations_but_in_a_tensor_group(
    reader: int, stage: int, tensor: int, stream: int
) -> None:
    """Of 3 readers x 2 stages: the stream is counted by readers first. Both ranks of a tensor group
    have the same activations."""
    one = learner(f"model.name={__name__}:Drops")
    one.readers, one.mesh = (
        RankOf(reader, 3),
        one.mesh._replace(pipe=RankOf(stage, 2), tensor=RankOf(tensor, 2)),
    )
    one.step([one.to_device(batch(4))], hyper(4), 7)
    torch.manual_seed(fold(7, stream) & (2**63 - 1))
    assert torch.equal(
        one.model.left, torch.nn.functional.dropout(one.model.left.new_ones(4, 64), 0.5)
    )


def test_evaluation_changes_no_state_and_adds_up_over_batches() -> None:
    one = learner("model.name=wide_resnet", "model.widths=[4,4,4,4]")
    before = digest(one.state())
    data = batch(6)
    sums = floats(one.evaluate(one.to_device(data)))
    assert digest(one.state()) == before
    halves = [
        floats(one.evaluate(one.to_device({k: v[s] for k, v in data.items()})))
        for s in (slice(0, 2), slice(2, 6))
    ]
    assert sums == pytest.approx({k: halves[0][k] + halves[1][k] for k in sums}, rel=1e-12)
    assert sums["count"] == 6


@pytest.mark.parametrize("framework", ["torch", "numpy", "jax"])
def test_hits_and_losses_of_a_batch_by_hand(framework: str) -> None:
    """Weights of 0 and biases (0, ln 2, ln 3): every image gets p = (1, 2, 3) / 6, and class 2 is
    the answer to all of them."""
    one = learner(f"framework={framework}", "model.name=linear")
    one.load(one.state() | {"p.fc.bias": np.log([1.0, 2.0, 3.0])})
    images = batch(6)["x"]
    for labels, hits in (([2, 0, 1, 2, 2, 0], 3), ([0, 1, 0, 1, 1, 0], 0), ([2] * 6, 6)):
        sums = floats(one.evaluate(one.to_device({"x": images, "y": np.array(labels)})))
        loss = sum(math.log(6 / (label + 1)) for label in labels)
        assert sums == {"loss": pytest.approx(loss, rel=1e-14), "right": hits, "count": 6}
        predictions = one.predict(one.to_device({"x": images, "y": np.array(labels)}))
        np.testing.assert_allclose(
            predictions.outputs, np.tile(np.log([1.0, 2.0, 3.0]), (6, 1)), rtol=1e-14
        )
        assert floats(predictions.sums) == sums
        trained = floats(
            one.step([one.to_device({"x": images, "y": np.array(labels)})], hyper(6, lr=0.0), 0)
        )
        assert trained == sums | {"nonfinite": 0.0}


def test_state_loads_into_another_learner_which_continues_equally() -> None:
    words = ["model.name=wide_resnet", "model.widths=[4,4,4,4]"]
    a = learner(*words)
    for step in range(3):
        a.step([a.to_device(batch(8, step))], hyper(8), step)
    b = learner(*words, "seed=2")
    assert digest(b.state()) != digest(a.state())
    b.load(a.state())
    for one in (a, b):
        one.step([one.to_device(batch(8, 9))], hyper(8), 9)
    assert digest(a.state()) == digest(b.state())
    assert any(name.startswith("b.stem.1.running_mean") for name in a.state())


def test_the_losses_of_outputs_wait_for_the_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they are copied by another stream. The last stage of a pipeline reads nothing else
    of a batch."""
    one: Any = learner("model.name=linear")
    data = one.to_device(batch(4))
    waited = list[DeviceBatch]()
    monkeypatch.setattr(
        one.forward.inputs, "arrays", lambda each: waited.append(each) or each.arrays
    )
    one.forward.losses(torch.zeros(4, 3, dtype=torch.float64), data, training=True)
    assert waited == [data]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs are here")
def test_a_reader_opens_no_context_on_another_gpu() -> None:
    used: list[int] = []
    inputs = Inputs(TASK, torch.device("cuda", 1), torch.float32, channels_last=False)

    def read() -> None:
        inputs.to_device(batch(4))
        used.append(torch.cuda.current_device())

    reader = threading.Thread(target=read)
    reader.start()
    reader.join()
    assert used == [1]


def test_a_state_of_another_model_is_refused() -> None:
    a = learner("model.name=mlp", "model.widths=[5]")
    b = learner("model.name=mlp", "model.widths=[6]")
    with pytest.raises(
        UserError, match=r"p\.fc1\.weight has shape \(6, 32\), the model has \(5, 32\)"
    ):
        a.load(b.state())
    with pytest.raises(UserError, match=r"the state lacks p\.fc1\.bias and 7 more"):
        a.load({})


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["model.name=torch.nn:Identity"], "torch.nn:Identity has no parameter to train"),
        (
            [
                "model.name=torch.nn:Conv2d",
                "model.in_channels=2",
                "model.out_channels=5",
                "model.kernel_size=1",
            ],
            "not logits (2, 3)",
        ),
        (["model.widths=[0,4,4,4]"], "are not valid"),
        (["model.name=mlp", "model.dropout=2"], "are not valid"),
        (["speed.device=cuda"], "no CUDA device is visible"),
        (["optim.name=sgdd"], "unknown name: sgdd"),
        (
            ["framework=numpy", "model.name=linear", "optim.name=torch.optim.SGD"],
            "torch.optim.SGD is a torch optimizer, but framework=numpy needs a rule",
        ),
        *(
            (["model.name=mlp", words], "no batch norm layer")
            for words in of_this_copy(["norm.kind=ghost"])
        ),
        (["model.name=faulty:not_a_model"], "returned a str, not a torch.nn.Module"),
        (
            ["model.name=faulty:Faulty", "model.depth=3"],
            "does not fit: got an unexpected keyword argument 'depth'",
        ),
    ],
)
def test_impossible_settings_are_refused_at_build_time(words: list[str], what: str) -> None:
    if "speed.device=cuda" in words and torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    with pytest.raises(UserError) as caught:
        learner(*words)
    assert what in caught.value.what
    assert caught.value.fix
