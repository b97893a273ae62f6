"""hvdtrain.train(model=, train_data=, val_data=, loss=, metrics=): objects of a script in the place
of names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from pool import alone
from ranks import FULL, mpirun, needs_extra, needs_mpirun
from rotation import rows_of_today
from torch import nn
from torch.nn import functional
from user_models_on_ranks import STRATEGIES

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.config.read import configure
from hvdtrain.data.field import Field
from hvdtrain.data.source import NamedArrays
from hvdtrain.errors import UserError
from hvdtrain.tasks.loss_modules import of_torch_module
from hvdtrain.tasks.user_tasks import own_loss
from hvdtrain.training.given import given_model, given_task, with_given
from hvdtrain.training.replicas.user_code import module_digests, named_modules, object_digests


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def numbers(samples: int, seed: int = 0) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).uniform(-1, 1, (samples, 3))
    return {"x": x, "y": x.sum(1)}


class Net(nn.Module):
    def __init__(self, outputs: int = 1, flat: bool = True) -> None:
        super().__init__()
        self.one = nn.Linear(3, 8)
        self.two = nn.Linear(8, outputs)
        self.flat = flat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.two(torch.tanh(self.one(x)))
        return found[:, 0] if self.flat else found


def square(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (outputs - batch["y"]) ** 2


def absolute(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (outputs - batch["y"]).abs()


BASE = {"batch.size": 32, "speed.precision": "fp64", "optim.base_lr": 0.1, "optim.momentum": 0.0}


def train(*arguments: str, **objects: Any) -> hvdtrain.Run:
    given = {
        "model": Net(),
        "train_data": numbers(64),
        "val_data": numbers(40, 1),
        "loss": square,
        **objects,
    }
    return hvdtrain.train(BASE | {"max_steps": 2}, *arguments, **given)


# what is computed


def test_steps_are_those_of_a_loop_by_hand_and_the_model_has_the_weights_afterwards() -> None:
    """One step of the whole training set: its samples are in no order. The metrics are those of
    torch for the validation set."""
    torch.manual_seed(3)
    net = Net()
    data = numbers(64)
    val = numbers(40, 1)
    by_hand = Net().double()
    by_hand.load_state_dict(net.state_dict())
    for _ in range(2):
        outputs = by_hand(torch.tensor(data["x"]))
        gradients = torch.autograd.grad(
            functional.mse_loss(outputs, torch.tensor(data["y"])), list(by_hand.parameters())
        )
        with torch.no_grad():
            for p, gradient in zip(by_hand.parameters(), gradients, strict=True):
                p.sub_(0.1 * gradient)

    def confusion(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.one_hot(2 * (batch["y"] > 0).long() + (outputs > 0), 4)

    metrics = {
        "mae": (absolute, "min"),
        "near": (
            lambda outputs, batch: ((absolute(outputs, batch) < 0.5).sum(), len(outputs)),
            "max",
        ),
        "recall": hvdtrain.OwnMetric(
            confusion, "max", length=4, of=lambda total: total[3] / (total[2] + total[3])
        ),
    }
    run = train(
        "batch.size=64",
        "run=one",
        model=net,
        train_data=data,
        val_data=val,
        metrics=metrics,
        objective="recall",
    )
    for p, expected in zip(net.parameters(), by_hand.parameters(), strict=True):
        # the script's own model stays float32
        torch.testing.assert_close(p, expected.float(), rtol=1e-6, atol=1e-7)
    found = next(
        event
        for event in map(json.loads, reversed(Path("one/events.jsonl").read_text().splitlines()))
        if event["kind"] == "epoch"
    )
    outputs = by_hand(torch.tensor(val["x"])).detach()
    y = torch.tensor(val["y"])
    assert found["val_loss"] == pytest.approx(functional.mse_loss(outputs, y).item(), rel=1e-9)
    assert found["val_mae"] == pytest.approx((outputs - y).abs().mean().item(), rel=1e-9)
    assert found["val_near"] == ((outputs - y).abs() < 0.5).double().mean().item()
    assert (
        run.last
        == found["val_recall"]
        == ((outputs > 0) & (y > 0)).sum().item() / (y > 0).sum().item()
    )
    assert (run.objective, found["best_recall"]) == ("recall", run.last)


@needs_extra("export")
@needs_extra("evaluate")
def test_objects_resume_exactly_and_their_names_are_in_the_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(1)
    start = Net()
    whole = Net()
    half = Net()
    whole.load_state_dict(start.state_dict())
    half.load_state_dict(start.state_dict())
    train("max_steps=6", "run=whole", model=whole)
    train("max_steps=3", "run=half", model=half)
    config = Path("half/config.yaml").read_text()
    for name in (
        f"<object of {__name__}:Net>",
        f"<object of {__name__}:square>",
        "<object of builtins:dict>",
    ):
        assert f"name: {name}\n" in config
    assert "\nresume   the same script, with resume=half stop.steps=6\n" in capsys.readouterr().out
    train("max_steps=6", "resume=half", model=half)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), half.parameters(), strict=True)
    )
    for command, words in (("evaluate", []), ("", ["max_steps=9"])):
        arguments = [command, "half"] if command else ["resume=half", *words]
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert "is an object that only its script defines\n" in said
        assert (
            "start that script again, with resume=RUN in its hvdtrain.train(); hvdtrain export "
            "RUN has the weights" in said
        )
    assert main(["--config", "half/config.yaml", "run=other"]) == 2
    assert (
        "data.name=<object of builtins:dict> is an object that only its script defines"
        in capsys.readouterr().err
    )
    assert main(["export", "half", "--to", "half.pt"]) == 0
    exported = torch.load("half.pt", weights_only=True)
    assert all(torch.equal(p, exported[name].float()) for name, p in half.state_dict().items())


def test_another_loss_in_the_folder_of_a_run_is_refused() -> None:
    train("run=one", loss=nn.SmoothL1Loss(beta=0.5))
    with pytest.raises(
        UserError,
        match=r"another data.task: .*SmoothL1Loss.*\n.*\n  fix: give the loss and metrics that "
        r"the run began with; or start another",
    ):
        train("run=one")
    with pytest.raises(
        UserError, match="the checkpoint has another data.loss.beta: 0.5, but this job has 0.25"
    ):
        train("run=one", loss=nn.SmoothL1Loss(beta=0.25))


@needs_extra("evaluate")
def test_a_built_in_task_has_metrics_of_the_users_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the digits, by a model of hvdtrain: among the first three classes; evaluate computes the
    task's own metrics."""

    def top3(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (outputs.topk(3).indices == batch["y"][:, None]).any(1)

    config = {"model.name": "linear", "epochs": 1, "run": "one"}
    run = hvdtrain.train(config, metrics={"top3": (top3, "max")}, objective="top3")
    epoch = hvdtrain.read(run).query("kind == 'epoch'").iloc[-1]
    assert run.last == epoch.val_top3 > epoch.val_accuracy > 0.5
    assert f"validation top3 {run.last:.4f}" in capsys.readouterr().out
    assert main(["evaluate", "one"]) == 0
    assert f"{epoch.val_accuracy:.4f}" in capsys.readouterr().out


def test_a_run_without_a_name_has_those_of_the_classes() -> None:
    run = train("max_steps=1")
    assert re.fullmatch(r"runs/dict-Net-[0-9]+-[0-9]+", str(run.folder))


@pytest.mark.parametrize(
    "model",
    [lambda shape: nn.Sequential(nn.Linear(shape[0], 1), nn.Flatten(0)), "mlp"],
    ids=["function", "name"],
)
def test_a_function_or_a_name_is_a_model_too(model: Any) -> None:
    loss = square if callable(model) else lambda outputs, batch: square(outputs[:, 0], batch)
    run = train("run=one", model=model, loss=loss)
    assert run.steps == 2


def test_a_loss_and_a_metric_in_jax(jax_compilation_cache: None) -> None:
    """As torch, for the same weights; the last batch is padded."""
    weight = np.array([[0.5], [-0.25], [1.0]])
    pair = lambda key: {"w": weight}, lambda p, x: (x @ p["w"])[:, 0]
    linear = nn.Linear(3, 1, bias=False)
    linear.weight.data = torch.tensor(weight.T, dtype=torch.float32)
    data = {
        "train_data": numbers(61),
        "metrics": {"mae": (lambda outputs, batch: abs(outputs - batch["y"]), "min")},
    }
    run = train("run=jax", "framework=jax", model=pair, **data)
    train("run=torch", model=nn.Sequential(linear, nn.Flatten(0)), **data)
    found, expected = (
        hvdtrain.read(run).query("kind == 'epoch'").iloc[-1] for run in ("jax", "torch")
    )
    for name in ("train_loss", "val_loss", "val_mae"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6)
    val = numbers(40, 1)
    outputs = pair[1](run.weights, val["x"])
    assert run.last == pytest.approx(float(((outputs - val["y"]) ** 2).mean()), rel=1e-12), (
        "the trained parameters of a pair"
    )


_MINE = """
import numpy as np, torch
from own_data import quantile, restore

def numbers(split, samples=60):
    x = np.random.default_rng(split == "val").uniform(size=(samples, 3))
    return {"x": x, "y": x.sum(1)}

class Net(torch.nn.Linear):
    def __init__(self, shape, outputs, bias=True):
        super().__init__(shape[0], outputs, bias)

class SignDescent(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, scale=1.0):
        super().__init__(params, {"lr": lr, "scale": scale})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"] * group["scale"])
"""


@needs_extra("evaluate")
def test_every_name_is_an_import_path_in_a_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with an option of its own. After two steps by signs a weight is one of few values."""
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("mine_all.py").write_text(_MINE)
    Path("all.yaml").write_text(
        "data: {name: mine_all:numbers, samples: 40}\n"
        "task: {name: mine_all:quantile, share: 0.75}\n"
        "model: {name: mine_all:Net, bias: false}\n"
        "optim: {name: mine_all:SignDescent, scale: 0.5, base_lr: 0.25}\n"
        "batch: {size: 40}\nspeed: {precision: fp64}\nmax_steps: 2\nrun: one\n"
    )
    assert main(["--config", "all.yaml"]) == 0
    said = capsys.readouterr().out
    assert "data    mine_all:numbers: 40 training and 40 validation samples, one quantile" in said
    assert (
        "model   mine_all:Net: Net, 3 parameters" in said and "recipe  mine_all:SignDescent" in said
    )
    names = [
        f"{section}.name=mine_all:{name}"
        for section, name in {"data": "numbers", "task": "quantile", "model": "Net"}.items()
    ]
    assert f"resume=one {' '.join(names)} optim.name=mine_all:SignDescent stop.steps=4" in said
    assert main(["evaluate", "one", *names]) == 0
    assert main(["resume=one", *names, "optim.name=mine_all:SignDescent", "max_steps=3"]) == 0


def test_the_program_of_the_readme_trains_in_15_lines() -> None:
    page = (Path(__file__).parents[1] / "README.md").read_text()
    program = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = [line for line in program[0].splitlines() if line.strip()]
    namespace: dict[str, Any] = {}
    exec(compile(program[0], "README.md", "exec"), namespace)
    run, net, x = (namespace[name] for name in ("run", "net", "x"))
    with torch.no_grad():
        error = (
            (net(torch.tensor(x, dtype=torch.float32)) - torch.tensor(x.prod(1)))
            .square()
            .mean()
            .item()
        )
    # of the mean of the targets 0.037
    assert len(lines) <= 15 and run.epochs >= 10 and error < 0.03


# losses of torch.nn

Y_OF = {
    "classes": torch.tensor([1, 0, 3, 2, 1]),
    "pixels": torch.tensor([[0, 1], [2, -100], [3, 3], [-100, -100], [1, 0]]),
}
Y_OF["whole"] = Y_OF["pixels"].clamp(min=0)


@pytest.mark.parametrize(
    ("loss", "outputs", "y"),
    [
        *(
            (kind(), (5, 4), "float")
            for kind in (
                nn.MSELoss,
                nn.L1Loss,
                nn.SmoothL1Loss,
                nn.HuberLoss,
                nn.BCELoss,
                nn.BCEWithLogitsLoss,
            )
        ),
        *(
            (kind(), (5, 4), "float")
            for kind in (
                nn.SoftMarginLoss,
                nn.PoissonNLLLoss,
                nn.MultiLabelSoftMarginLoss,
                nn.HingeEmbeddingLoss,
            )
        ),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0])), (5, 4), "float"),
        (nn.MultiMarginLoss(), (5, 4), "classes"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), (5, 4), "classes"),
        (nn.CrossEntropyLoss(), (5, 4), "float"),
        (nn.CrossEntropyLoss(ignore_index=1), (5, 4), "classes"),
        (nn.CrossEntropyLoss(), (5, 4, 2), "pixels"),
        (nn.NLLLoss(), (5, 4, 2), "pixels"),
        (nn.CrossEntropyLoss(ignore_index=9), (5, 4, 2), "whole"),
        (nn.CrossEntropyLoss(), (5, 4, 2), "float"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_a_mean_of_torch_is_the_mean_over_samples(
    loss: Any, outputs: tuple[int, ...], y: str
) -> None:
    torch.manual_seed(0)
    given = torch.rand(outputs, dtype=torch.float64)
    target = torch.rand(outputs, dtype=torch.float64) if y == "float" else Y_OF[y]
    source = NamedArrays({"x": given.numpy(), "y": target.numpy()})
    loss = loss.double()
    task = own_loss("own", source, source, "where", loss, None)
    each = task.loss.of(given, {"y": target})
    assert each.shape == (5,)
    weight = task.weight({"x": given.numpy(), "y": target.numpy()})
    assert each.sum() / weight == pytest.approx(loss(given, target).item(), rel=1e-12)
    ignored = getattr(loss, "ignore_index", None)
    assert (task.sample_weight is None) == (ignored is not None and bool((target == ignored).any()))


class Focal(nn.CrossEntropyLoss):
    """Not a mean over samples."""

    def forward(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(outputs, y).exp()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            nn.CrossEntropyLoss(weight=torch.ones(4)),
            "loss=CrossEntropyLoss with weight divides by the weights of the batch, so it is not "
            "a mean",
        ),
        (
            nn.MSELoss(reduction="sum"),
            "loss=MSELoss with reduction='sum' depends on how many samples a batch has",
        ),
        (nn.KLDivLoss(reduction="batchmean"), "with reduction='batchmean' depends"),
        (nn.CosineEmbeddingLoss(), "with reduction='mean' may look at several samples at once"),
        (Focal(), "loss=Focal with reduction='mean' may look at several samples at once"),
        (nn.Linear(1, 1), "loss=Linear has parameters, which would not be trained"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_loss_of_torch_that_is_no_mean_over_samples_is_refused(
    loss: nn.Module, message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        of_torch_module(
            loss,
            "where",
            {"x": Field("float64", (3,)), "y": Field("float64", ())},
            lambda value: True,
            str,
        )
    with pytest.raises(
        UserError, match="loss=MSELoss compares outputs with y, but the data only have x"
    ):
        of_torch_module(
            nn.MSELoss(), "where", {"x": Field("float64", (3,))}, lambda value: True, str
        )


# bad input


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        (
            {"loss": lambda outputs, batch: square(outputs, batch).mean()},
            r"loss gives one number for 2 samples, not \(2,\)\n.*loss\n.*reduction",
        ),
        (
            {"loss": lambda outputs, batch: square(outputs, batch)[:, None]},
            r"loss gives \(2, 1\) for 2 samples, not \(2,\)\n.*\n.*mean or sum over",
        ),
        ({"loss": lambda outputs, batch: 1.0}, r"loss gives a float, not a tensor \(2,\)"),
        (
            {"loss": lambda outputs, batch: square(outputs, batch) - square(outputs, batch).mean()},
            "loss of a sample depends on the other samples",
        ),
        (
            {
                "model": Net(flat=False),
                "loss": lambda outputs, batch: square(outputs, batch).mean(1),
            },
            r"loss of a sample depends on .*\n.*\n.*\(n, n\)",
        ),
        (
            {"loss": lambda outputs, batch: batch["z"]},
            r"the loss of task.name=<object of .*fails for what the model gives: KeyError: "
            r"'z'\n.*own_code.py:\d+",
        ),
        (
            {"model": Net(flat=False), "loss": nn.MSELoss()},
            r"loss=MSELoss compares outputs \(2, 1\) and y \(2,\), which torch would "
            r"broadcast\n.*\n.*squeeze\(1\)",
        ),
        ({"loss": nn.MSELoss(reduction="sum")}, r"depends on how many samples"),
        (
            {"loss": functional.mse_loss},
            r"the loss of task.name=<object of torch.nn.functional:mse_loss> fails",
        ),
        ({"loss": 3}, r"loss is a int"),
        (
            {"metrics": {"mae": absolute}},
            r"metric mae has no direction\n.*\n  fix: \{\"mae\": \(function, \"max\"\)\}",
        ),
        ({"metrics": {"mae": (absolute, "lower")}}, "metric mae is .*'lower'"),
        ({"metrics": {"loss": (absolute, "min")}}, "already has a metric loss"),
        (
            {"metrics": {"mean": (lambda outputs, batch: absolute(outputs, batch).mean(), "min")}},
            r"metric mean returns \(\), not \(2,\)",
        ),
        (
            {"metrics": {"all": hvdtrain.OwnMetric(absolute, "min", 5, np.sum)}},
            r"metric all returns \(2,\), not \(2, 5\)",
        ),
        (
            {"metrics": {"all": hvdtrain.OwnMetric(absolute, "min", 5)}},
            r"metric all has length=5 and of=None",
        ),
        (
            {
                "metrics": {
                    "rank": (lambda outputs, batch: outputs.argsort().argsort().double(), "min")
                }
            },
            "metric rank of a sample depends on the other",
        ),
        (
            {"metrics": {"z": (lambda outputs, batch: batch["z"], "min")}},
            r"metric z fails: KeyError: 'z'\n.*metrics; .*own_code.py:\d+",
        ),
        (
            {"metrics": {"none": (lambda outputs, batch: None, "min")}},
            r"metric none fails: RuntimeError: Could not infer dtype",
        ),
        ({"metrics": {"epochs": (absolute, "min")}}, "a metric or a sum named epochs"),
        ({"metrics": {"noise_scale": (absolute, "min")}}, "a metric or a sum named noise_scale"),
        ({"objective": "f1"}, "objective=f1 is not a metric"),
        (
            {"val_data": None},
            r"val_data is missing\n.*\n  fix: val_data= of the same kind, or data.val_share=0.1",
        ),
        ({"train_data": None}, "val_data without train_data"),
        (
            {"val_data": {"x": np.zeros((4, 3))}},
            "y is float64 .* in the training set, missing in the validation set",
        ),
        (
            {"train_data": {"a": np.zeros((32, 3))}},
            "needs a field x, which the model is called with",
        ),
        ({"model": 3}, "model is a int"),
        (
            {"model": lambda shape, depth: None},
            "does not fit: missing a required argument: 'depth'",
        ),
        ({"model": nn.Identity()}, "gave|has no parameter to train"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_a_clear_error(objects: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train("max_steps=1", "run=one", **objects)
    assert not Path("one").exists()


def test_keys_that_an_object_does_not_have_are_refused() -> None:
    for argument, message in {
        "model.widths=[3]": "does not fit: got an unexpected keyword argument 'widths'",
        "model.label_smoothing=0.1": "model.label_smoothing needs task.name=classification",
        "data.val_share=0.2": "val_data and data.val_share=0.2 are both given",
        "task.share=3": "got an unexpected keyword argument 'share'",
        "augment.mixup=0.2": "augmentation needs images",
        "framework=numpy": "framework=numpy",
    }.items():
        with pytest.raises(UserError, match=re.escape(message)):
            train(argument, "run=one")


# ranks


def test_what_ranks_compare_of_objects() -> None:
    def digest(model: Any, loss: Any = square) -> dict[str, str]:
        given = {
            "model": given_model(model),
            "task": given_task(loss, {"mae": (absolute, "min")}, None),
        }
        return object_digests(with_given(configure(None, []), given))

    def weighted(weight: float) -> Any:
        return lambda outputs, batch: weight * square(outputs, batch)

    def using(thing: Any) -> Any:
        return lambda outputs, batch: thing.square(outputs)

    def of_another_process(name: str) -> ModuleType:
        module = ModuleType(name)  # numpy and jax.numpy have a shape and a dtype, as arrays have
        module.__dict__.update(shape=np.shape, dtype=np.dtype)
        return module

    numpy = using(of_another_process("numpy"))
    objects = using(np.array([object()]))
    assert (
        digest(Net(), numpy)
        == digest(Net(), using(of_another_process("numpy")))
        != digest(Net(), using(of_another_process("jax.numpy")))
    )
    assert (
        digest(Net(), objects)
        == digest(Net(), using(np.array([object()])))
        != digest(Net(), using(np.array([object()] * 2)))
    )
    names = {f"the {name} of the script" for name in ("model", "loss", "metric mae")}
    assert digest(Net()) == digest(Net()) and digest(Net()).keys() == names
    assert digest(Net(2)) != digest(Net()) and digest(nn.Dropout(0.1)) != digest(nn.Dropout(0.2))
    assert (
        digest(Net(), weighted(1.0)) == digest(Net(), weighted(1.0)) != digest(Net(), weighted(2.0))
    )
    assert digest(Net(), nn.CrossEntropyLoss()) != digest(
        Net(), nn.CrossEntropyLoss(label_smoothing=0.1)
    )
    assert digest(Net(), lambda o, b: o) != digest(Net(), lambda o, b: -o)
    given = with_given(
        configure(None, []),
        {"model": given_model(Net()), "task": given_task(nn.MSELoss(), None, None)},
    )
    assert {
        f"{__name__}:Net",
        "torch.nn.modules.linear:Linear",
        "torch.nn.modules.loss:MSELoss",
    } <= set(named_modules(given))
    assert f"{__name__}" in module_digests(named_modules(given))


@pytest.mark.parametrize("ema", [None, 0.9])
def test_the_object_has_the_weights_that_were_reported_and_the_run_those_that_training_goes_on_from(
    ema: float | None,
) -> None:
    """With optim.ema the first are averages: mean_t = mean + (p_t - mean) (1 - d) / (1 - d^t), of
    SGD by hand."""
    torch.manual_seed(3)
    net = Net().double()
    data = numbers(64)
    val = numbers(40, 1)
    weights = [p.detach().clone().requires_grad_() for p in net.parameters()]
    means = [torch.zeros_like(p) for p in weights]
    x = torch.tensor(data["x"])
    y = torch.tensor(data["y"])
    for step in range(1, 4):
        outputs = torch.func.functional_call(
            net, dict(zip(dict(net.named_parameters()), weights, strict=True)), x
        )
        gradients = torch.autograd.grad(functional.mse_loss(outputs, y), weights)
        weights = [
            (p - 0.1 * g).detach().requires_grad_() for p, g in zip(weights, gradients, strict=True)
        ]
        share = 1.0 if ema is None else (1 - ema) / (1 - ema**step)
        means = [
            (mean + share * (p - mean)).detach() for mean, p in zip(means, weights, strict=True)
        ]
    run = train(
        "batch.size=64",
        "max_steps=3",
        f"optim.ema={'null' if ema is None else ema}",
        model=net,
        train_data=data,
        val_data=val,
    )
    for p, expected in zip(net.parameters(), means, strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-12, atol=1e-12)
    assert run.last == pytest.approx(
        functional.mse_loss(net(torch.tensor(val["x"])), torch.tensor(val["y"])).item(), rel=1e-12
    )
    assert len(run.weights) == len(weights)
    for (name, _), expected in zip(net.named_parameters(), weights, strict=True):
        np.testing.assert_allclose(
            run.weights[name], expected.detach().numpy(), rtol=1e-12, atol=1e-12
        )


@needs_extra("export")
def test_the_object_and_export_have_the_best_weights_where_the_run_restores_them(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """At a rate that grows 4 times an epoch the last evaluation is far from the best; run.weights
    are those of the last step."""
    net = Net().double()
    last = Net().double()
    val = numbers(40, 1)
    job = [
        "stop.restore_best=true",
        "checkpoint.keep_last=1",
        "max_steps=null",
        "epochs=5",
        "recipe.schedule=exponential",
    ]
    job += ["recipe.gamma=4", "run=one"]
    run = train(*job, model=net, val_data=val)
    assert run.best < 0.5 * run.last

    def loss(model: Net) -> float:
        return functional.mse_loss(model(torch.tensor(val["x"])), torch.tensor(val["y"])).item()

    assert loss(net) == pytest.approx(run.best, rel=1e-12)
    assert (
        "weights  of the best evaluation (stop.restore_best): the script's model, export, evaluate,"
        in capfd.readouterr().out
    )
    for checkpoint, expected in (([], run.best), (["--checkpoint", "newest"], run.last)):
        assert main(["export", "one", "--to", "one.pt", "--force", *checkpoint]) == 0
        last.load_state_dict(torch.load("one.pt", weights_only=True))
        assert loss(last) == pytest.approx(expected, rel=1e-12)
    assert all(
        np.array_equal(run.weights[name], p.detach().numpy()) for name, p in last.named_parameters()
    )
    best, _ = sorted(Path("one/checkpoints").iterdir())
    (best / "weights.safetensors").write_bytes(b"")
    train(*job, model=net, val_data=val)  # is over
    assert loss(net) == pytest.approx(run.last, rel=1e-12)
    said = f"the checkpoint of the best evaluation ({run.best:.4f} in epoch "
    assert said in capfd.readouterr().err


TODAY = rows_of_today(list(STRATEGIES))


@pytest.fixture(scope="module")
def after_training(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    """By rank and strategy, from one start of MPI."""
    done = mpirun(
        2,
        alone("user_models_on_ranks:main", str(tmp_path_factory.mktemp("given")), "mpi", *TODAY),
    )
    assert done.returncode == 0, done.stderr
    return [
        json.loads(line.removeprefix("after "))
        for line in done.stderr.splitlines()
        if line.startswith("after ")
    ]


@needs_mpirun
@pytest.mark.slow
@pytest.mark.every_day
@pytest.mark.parametrize("strategy", TODAY)
def test_every_rank_has_the_object_that_was_reported(
    strategy: str, after_training: list[dict[str, dict[str, float]]]
) -> None:
    """Whole, wherever training had it in parts; run.weights has the same numbers, unless they are
    averages of those."""
    assert len(after_training) == 2
    for found in (rank[strategy] for rank in after_training):
        assert found["object"] == pytest.approx(
            found["best" if "best" in strategy else "reported"], rel=1e-12
        )
        assert found["moved"] > 0.01
        assert (
            (found["from_raw"] > 0.01)
            if {"averages", "best"} & set(strategy.split())
            else (found["from_raw"] == 0)
        )
        assert "best" not in strategy or found["best"] < 0.5 * found["reported"]


_ON_RANKS = """
import os, sys
import hvdtrain, numpy as np, torch
from mpi4py import MPI
rank, what, run = MPI.COMM_WORLD.rank, sys.argv[1], sys.argv[2]
x = np.random.default_rng(rank if what == "data" else 0).uniform(size=(61, 3))
torch.manual_seed(rank)  # other initial weights: those of rank 0 count
net = torch.nn.Sequential(torch.nn.Linear(3, 4 + (what == "model") * rank), torch.nn.Tanh(), torch.nn.LazyLinear(1), torch.nn.Flatten(0))
def distance(power):
    return lambda outputs, batch: (outputs - batch["y"]).abs() ** power
loss = distance(2 + (what == "loss") * rank)
data = {"x": x, "y": x.sum(1)}
config = {"epochs": 2, "run": run, "comm.engine": "mpi", "batch.size": 16}
done = hvdtrain.train(config, model=net, train_data=data, val_data=data, loss=loss, metrics={"mae": (loss, "min")})
numbers = [done.last, *[p.double().sum().item() for p in net.parameters()]]
sys.stderr.write(f"same {numbers}\\n")
"""  # noqa: E501


@needs_mpirun
@pytest.mark.slow
def test_objects_on_two_ranks(tmp_path: Path) -> None:
    """Rank 0's weights count, every rank has the trained model; ranks with other objects are
    refused."""
    script = tmp_path / "script.py"
    script.write_text(_ON_RANKS)
    done = mpirun(2, [str(script), "same", str(tmp_path / "run")])
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("same ")]
    assert len(lines) == 2 and lines[0] == lines[1]
    messages = {
        "model": "the model of the script differs between ranks",
        "loss": "the loss of the script differs between ranks",
        "data": "digest of the training arrays differs between ranks",
    }
    for what, message in (
        messages.items() if FULL else [*messages.items()][:1]
    ):  # test_what_ranks_compare_of_objects has each of them
        done = mpirun(2, [str(script), what, str(tmp_path / what)])
        assert done.returncode == 2 and message in done.stderr, done.stderr


_FAILING = """
import sys
import hvdtrain, numpy as np, torch
from mpi4py import MPI
what, run = sys.argv[1:]
bad = MPI.COMM_WORLD.rank == 1
calls = dict.fromkeys(("forward", "loss", "metric", "optimizer"), 0)

def count(name, training=True):
    calls[name] += training
    if bad and what == name and calls[name] == 40:
        raise ArithmeticError(f"{name} was made to fail")  # of all

class Net(torch.nn.Linear):
    def forward(self, x):
        count("forward", self.training)
        return super().forward(x)[:, 0]

class Descent(torch.optim.SGD):
    def step(self, closure=None):
        count("optimizer")
        return super().step(closure)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if bad and what == "dataset" and index == 77 and calls["forward"] > 3:
            raise ArithmeticError("dataset was made to fail")  # of the data
        x = torch.arange(3.0) + index / 100
        return x, x.sum()

def collate(samples):
    if bad and what == "collate" and float(samples[0][1]) > 3.9 and calls["forward"] > 3:
        raise ArithmeticError("collate was made to fail")  # of the data
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])

def function(split):
    if bad and what == "function":
        raise ArithmeticError("function was made to fail")  # of the data
    return Data(), collate

def loss(outputs, batch):
    count("loss")
    return (outputs - batch["y"]) ** 2

def metric(outputs, batch):
    count("metric")
    return loss(outputs, batch)

config = {"epochs": 100, "run": run, "comm.engine": "mpi", "batch.size": 10, "log.per_rank": True}
config |= {"optim": {"name": Descent, "base_lr": 1e-3}, "data.name": function}
hvdtrain.train(config, model=Net(3, 1), loss=loss, metrics={"own": (metric, "min")})
"""


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["forward", "dataset", *["metric", "function", "loss", "optimizer", "collate"] * FULL]
)
def test_an_error_in_the_users_code_names_line_rank_and_step_and_ends_all_ranks(
    what: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(_FAILING)
    done = mpirun(2, [str(script), what, str(tmp_path / "run")])
    text = f"ArithmeticError: {what} was made to fail"
    of_data = what in ("dataset", "collate", "function")
    line = next(
        number
        for number, text in enumerate(_FAILING.splitlines(), 1)
        if (f'"{what} was' in text if of_data else "# of all" in text)
    )
    assert done.returncode == (2 if what in ("dataset", "collate") else 1), done.stderr
    assert "Traceback (most recent call last)" in done.stderr and text in done.stderr, done.stderr
    note = re.search(
        rf"^rank 1 on \S+, (.*): {script}:{line}, in \w+: raise ArithmeticError",
        done.stderr,
        re.MULTILINE,
    )
    assert note, done.stderr
    if what == "function":
        assert note[1] == "reading the data"
    else:
        assert re.fullmatch(
            r"step \d+ \((step|reading samples)\)|(evaluation|synchronizing) after step \d+",
            note[1],
        ), note[1]
        log = (tmp_path / "run" / "ranks" / "rank-00001.log").read_text()
        assert text in log and note[0] in log
    if what == "dataset":
        assert "sample 77" in done.stderr
