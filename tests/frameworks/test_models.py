"""The models: shapes, parameters counted by hand, and gradients that reach every parameter."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.config import plugins
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.check_outputs import MasksWithGaps
from hvdtrain.frameworks.torch.model import init_classifier
from hvdtrain.frameworks.torch.models import (
    alexnet,
    cifar_resnet,
    convnet,
    linear,
    mlp,
    resnet,
    wide_resnet,
)


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_wide_resnet_has_the_parameters_of_its_description() -> None:
    def convolution(i: int, o: int) -> int:
        return 9 * i * o + 2 * o  # no bias; scale and shift of the norm

    def block(i: int, o: int) -> int:
        return convolution(i, o) + convolution(o, o) + (i * o + o if i != o else 0)

    for channels, widths in ((1, (16, 160, 320, 640)), (3, (16, 16, 32, 64))):
        stem, a, b, c = widths
        body = block(stem, a) + block(a, a) + block(a, b) + block(b, b) + block(b, c) + block(c, c)
        expected = convolution(channels, stem) + body + 10 * c + 10
        assert (
            parameters(wide_resnet.build("wide_resnet", (28, 28, channels), 10, widths=widths))
            == expected
        )


def test_wide_resnet_halves_twice_and_pools_the_rest() -> None:
    model = wide_resnet.build("wide_resnet", (28, 28, 1), 10)
    sizes = []
    model.wide.register_forward_hook(
        lambda module, inputs, output: sizes.append(tuple(output.shape))
    )
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert sizes == [(2, 64, 7, 7)]
    assert [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)] == [0.01] * 6


@pytest.mark.parametrize("shape", [(28, 28, 1), (32, 32, 3), (8, 8, 1), (33, 20, 3)])
@pytest.mark.parametrize("name", ["wide_resnet", "mlp", "linear", "resnet18", "resnet8", "convnet"])
def test_every_model_takes_every_shape_and_learns_with_all_its_parameters(
    name: str, shape: tuple[int, int, int]
) -> None:
    model = plugins.load("frameworks/torch/models", name, "here").build(name, shape, 7)
    logits = model(torch.randn(3, shape[2], shape[0], shape[1]))
    assert logits.shape == (3, 7)
    torch.nn.functional.cross_entropy(logits, torch.tensor([0, 3, 6])).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_mlp_layers() -> None:
    model = mlp.build("mlp", (4, 4, 2), 3, widths=(5, 6))
    assert parameters(model) == 32 * 5 + 5 + 5 * 6 + 6 + 6 * 3 + 3


def test_resnet_by_name() -> None:
    # torchvision's published count
    assert parameters(resnet.build("resnet50", (224, 224, 3), 1000)) == 25_557_032
    shortcuts = 16 * 32 + 32 * 64 + 2 * (32 + 64)  # which have no parameters in the paper
    for name, count in (("resnet20", 269_722), ("resnet56", 853_018), ("resnet110", 1_727_962)):
        assert parameters(cifar_resnet.build(name, (32, 32, 3), 10)) == count + shortcuts
    with pytest.raises(UserError, match="leaves no scale that could start at 0"):
        resnet.build("resnet18", (32, 32, 3), 10, zero_gamma=True, norm=False)
    small = resnet.build("resnet18", (32, 32, 3), 10, small_images=True)
    sizes = []
    small.layer1.register_forward_hook(
        lambda module, inputs, output: sizes.append(tuple(output.shape))
    )
    small(torch.randn(2, 3, 32, 32))
    assert sizes == [(2, 64, 32, 32)]


def test_wide_resnet_computes_what_it_describes() -> None:
    """Against the same network written out, in evaluation mode with statistics that are not the
    initial ones."""
    torch.manual_seed(3)
    model = wide_resnet.build("wide_resnet", (8, 12, 3), 5, widths=(4, 4, 6, 8)).double().eval()
    state = {
        name: torch.rand_like(t, dtype=torch.float64) if t.is_floating_point() else t
        for name, t in model.state_dict().items()
    }
    model.load_state_dict(state)
    f = torch.nn.functional

    def convolution(x: torch.Tensor, at: str) -> torch.Tensor:
        x = f.conv2d(x, state[f"{at}.0.weight"], padding=1)
        s = {
            key: state[f"{at}.1.{key}"].view(1, -1, 1, 1)
            for key in ("running_mean", "running_var", "weight", "bias")
        }
        return (
            (x - s["running_mean"]) / (s["running_var"] + 1e-5).sqrt() * s["weight"] + s["bias"]
        ).clamp(min=0)

    def block(x: torch.Tensor, at: str) -> torch.Tensor:
        scaled = (
            f.conv2d(x, state[f"{at}.scale.weight"], state[f"{at}.scale.bias"])
            if f"{at}.scale.weight" in state
            else x
        )
        return scaled + convolution(convolution(x, f"{at}.first"), f"{at}.second")

    x = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    expected = convolution(x, "stem")
    for group in ("narrow", "middle", "wide"):
        expected = block(block(expected, f"{group}.0"), f"{group}.1")
        expected = expected if group == "wide" else f.max_pool2d(expected, 2)
    expected = expected.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"]
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=0)
    assert {name.rsplit(".", 1)[0] for name in state if ".scale." in name} == {
        "middle.0.scale",
        "wide.0.scale",
    }


def test_mlp_computes_what_it_describes() -> None:
    model = mlp.build("mlp", (2, 3, 2), 4, widths=(5, 6)).double()
    x = torch.randn(3, 2, 2, 3, dtype=torch.float64)
    hidden = x.reshape(3, 12)
    for layer in (model.fc1, model.fc2):
        hidden = (hidden @ layer.weight.T + layer.bias).clamp(min=0)
    torch.testing.assert_close(model(x), hidden @ model.head.weight.T + model.head.bias)


@pytest.mark.parametrize("norm", [True, False])
def test_convnet_computes_what_it_describes(norm: bool) -> None:
    torch.manual_seed(5)
    model = convnet.build("convnet", (28, 8, 2), 4, widths=(3, 5), norm=norm).double()
    x = torch.randn(6, 2, 28, 8, dtype=torch.float64)
    state = dict(model.named_parameters())
    kinds = (
        ("conv{}.weight", "norm{}.weight", "norm{}.bias")
        if norm
        else ("conv{}.weight", "conv{}.bias")
    )
    assert list(state) == [
        *(kind.format(i) for i in (1, 2) for kind in kinds),
        "fc.weight",
        "fc.bias",
    ]
    f = torch.nn.functional
    expected = x
    for i in (1, 2):
        padded = f.pad(expected, (1, 1, 1, 1))
        patches = f.unfold(padded, 3, stride=2)  # (n, 9 C, H W / 4)
        weight = state[f"conv{i}.weight"]
        rows = (weight.flatten(1) @ patches).unflatten(
            2, (expected.shape[2] // 2, expected.shape[3] // 2)
        )
        if norm:
            centred = rows - rows.mean((0, 2, 3), keepdim=True)
            rows = centred / (centred.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()
        else:
            rows = rows + state[f"conv{i}.bias"].view(1, -1, 1, 1)
        expected = rows.clamp(min=0)
    expected = expected.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"]
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-12)


def test_convnet_first_weights_are_uniform_as_described() -> None:
    torch.manual_seed(1)
    model = convnet.build("convnet", (28, 28, 1), 10, norm=False)
    assert parameters(model) == 9 * (16 + 16 * 32 + 32 * 64) + 16 + 32 + 64 + 650
    for p, fan_in in (
        (model.conv3.weight, 9 * 32),
        (model.conv3.bias, 9 * 32),
        (model.fc.weight, 64),
    ):
        bound = fan_in**-0.5
        assert 0.9 * bound < p.abs().max() <= bound
        assert p.std().item() == pytest.approx(bound / 3**0.5, rel=0.2)


def test_convnet_without_channels_is_refused() -> None:
    for widths in ((), (16, 0)):
        with pytest.raises(UserError) as error:
            convnet.build("convnet", (28, 28, 1), 10, widths=widths)
        assert f"widths {widths} are not valid" in str(error.value)
        assert "model.widths" in str(error.value)


def test_convnet_with_hidden_dense_layers() -> None:
    model = convnet.build("convnet", (8, 8, 1), 4, widths=(3,), norm=False, dense=(5, 6)).double()
    assert [name for name, _ in model.named_parameters()][2::2] == [
        "dense.fc1.weight",
        "dense.fc2.weight",
        "dense.fc.weight",
    ]
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    pooled = []
    model.flatten.register_forward_hook(lambda module, inputs, output: pooled.append(output))
    found = model(x)
    expected = pooled[0]
    for layer in (model.dense.fc1, model.dense.fc2):
        expected = (expected @ layer.weight.T + layer.bias).clamp(min=0)
    torch.testing.assert_close(found, expected @ model.dense.fc.weight.T + model.dense.fc.bias)
    assert (model.dense_part, convnet.build("convnet", (8, 8, 1), 4).dense_part) == ("dense", "fc")
    with pytest.raises(UserError, match=r"dense \(0,\) is not valid"):
        convnet.build("convnet", (8, 8, 1), 4, dense=(0,))


def test_alexnet_has_the_parameters_of_torchvisions() -> None:
    with torch.device("meta"):
        assert parameters(alexnet.build("alexnet", (224, 224, 3), 1000)) == 61_100_840


@pytest.mark.parametrize("shape", [(224, 224, 3), (64, 90, 1), (32, 32, 3), (8, 20, 1)])
def test_alexnet_computes_what_it_describes(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(6)
    model = alexnet.build("alexnet", shape, 7, widths=(3, 4, 5, 4, 6), dense=(8, 9)).double()
    x, state, f = (
        torch.randn(2, shape[2], *shape[:2], dtype=torch.float64),
        dict(model.named_parameters()),
        torch.nn.functional,
    )
    is_small = min(shape[:2]) < 64
    expected = x
    sides = {(224, 224): (6, 6), (64, 90): (1, 1), (32, 32): (4, 4), (8, 20): (1, 3)}
    for i, padding in enumerate((2, 2, 1, 1, 1), start=1):
        stride = 4 if i == 1 and not is_small else 1
        assert state[f"conv{i}.weight"].shape[2] == (11 if stride == 4 else 2 * padding + 1)
        expected = f.conv2d(
            expected, state[f"conv{i}.weight"], state[f"conv{i}.bias"], stride, padding
        ).clamp(min=0)
        if i in (1, 2, 5):
            expected = f.max_pool2d(expected, 3, 2, padding=1 if is_small else 0)
    assert expected.shape[2:] == sides[shape[:2]]
    expected = expected.flatten(1)
    for name in ("fc6", "fc7"):
        expected = (expected @ state[f"dense.{name}.weight"].T + state[f"dense.{name}.bias"]).clamp(
            min=0
        )
    expected = expected @ state["dense.fc8.weight"].T + state["dense.fc8.bias"]
    torch.testing.assert_close(model.eval()(x), expected, rtol=1e-10, atol=1e-12)
    dropped = model.train()(x) != model(x)
    assert [type(layer).__name__ for layer in model.dense] == ["Linear", "ReLU", "Dropout"] * 2 + [
        "Linear"
    ] and dropped.any()
    torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 6])).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_alexnet_that_is_none_is_refused() -> None:
    for options in ({"widths": (1, 2, 3, 4, 0)}, {"dense": (0,)}, {"dropout": 1.0}):
        with pytest.raises(UserError, match="are not valid"):
            alexnet.build("alexnet", (32, 32, 3), 10, **options)


@pytest.mark.parametrize(
    ("name", "last", "blocks"), [("resnet18", "bn2", 8), ("resnet50", "bn3", 16)]
)
def test_zero_gamma_starts_each_residual_block_as_its_shortcut(
    name: str, last: str, blocks: int
) -> None:
    model = resnet.build(name, (32, 32, 3), 10, small_images=True, zero_gamma=True)
    norms = {
        path: norm for path, norm in model.named_modules() if isinstance(norm, torch.nn.BatchNorm2d)
    }
    zero = {path for path, norm in norms.items() if torch.count_nonzero(norm.weight) == 0}
    assert zero == {path for path in norms if path.endswith(f".{last}")}
    assert len(zero) == blocks
    # its shortcut is the identity
    block = model.layer1[1]
    x = torch.rand(2, 64 if last == "bn2" else 256, 4, 4)
    assert torch.equal(block(x), x)
    assert all(
        torch.all(norm.weight == 1)
        for norm in norms.values()
        if norm not in [norms[path] for path in zero]
    )
    plain = resnet.build(name, (32, 32, 3), 10)
    assert all(
        torch.all(norm.weight == 1)
        for norm in plain.modules()
        if isinstance(norm, torch.nn.BatchNorm2d)
    )


def test_zero_gamma_learns_in_resnet_but_never_would_in_wide_resnet() -> None:
    """Why wide_resnet has no such option: its blocks end in ReLU after the norm."""
    torch.manual_seed(2)
    images = torch.randn(4, 3, 16, 16)
    labels = torch.arange(4)
    residual = resnet.build("resnet18", (16, 16, 3), 4, small_images=True, zero_gamma=True)
    wide = wide_resnet.build("wide_resnet", (16, 16, 3), 4, dropout=0.0)
    blocks = [block for block in wide.modules() if isinstance(block, wide_resnet.WideResNetBlock)]
    for block in blocks:
        torch.nn.init.zeros_(block.second[1].weight)
    for model in (residual, wide):
        torch.nn.functional.cross_entropy(model(images), labels).backward()
    gradients = [p.grad for path, p in residual.named_parameters() if path.endswith(".bn2.weight")]
    assert len(gradients) == 8
    assert all(torch.count_nonzero(g) > 0.9 * g.numel() for g in gradients)
    branch = [
        p for block in blocks for part in (block.first, block.second) for p in part.parameters()
    ]
    assert len(branch) == 6 * 2 * 3
    assert all(torch.count_nonzero(p.grad) == 0 for p in branch)
    assert torch.count_nonzero(wide.fc.weight.grad) > 0


def test_the_classifier_starts_from_a_normal_distribution() -> None:
    torch.manual_seed(3)
    body = torch.nn.Sequential(
        torch.nn.Linear(200, 50),
        torch.nn.ReLU(),
        torch.nn.Linear(50, 50),
        torch.nn.Linear(50, 7, bias=False),
    )
    before = {name: p.clone() for name, p in body.named_parameters()}
    init_classifier(body, 50, 0.01, "here")
    after = dict(body.named_parameters())
    # the last of two with 50
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        "2.weight",
        "2.bias",
    }
    assert torch.count_nonzero(body[2].bias) == 0
    # 2500 weights: 5 standard errors
    assert body[2].weight.mean().item() == pytest.approx(0, abs=5 * 0.01 / 50)
    assert body[2].weight.std().item() == pytest.approx(0.01, rel=0.1)
    init_classifier(body, 7, 2.0, "here")  # without a bias
    assert body[3].weight.std().item() == pytest.approx(2.0, rel=0.3)


def test_a_model_without_a_classifier_is_refused() -> None:
    with pytest.raises(UserError) as error:
        init_classifier(linear.build("linear", (8, 8, 1), 10), 9, 0.01, "job.yaml:3")
    assert "Linear has no linear layer with 9 outputs, one for each class" in str(error.value)
    assert "where: job.yaml:3" in str(error.value)
    assert "fix: leave model.classifier_std out" in str(error.value)


def test_a_mask_without_numbers_is_not_true_everywhere() -> None:
    """Libraries ask whether they may leave a mask out, also in `plan`, where tensors have no
    numbers."""
    mask = torch.ones(3, dtype=torch.bool, device="meta")
    with pytest.raises(RuntimeError, match="meta tensors"):
        bool(mask.all())
    with MasksWithGaps():
        assert not mask.all()
        assert torch.ones(3, dtype=torch.bool).all()
        with pytest.raises(RuntimeError, match="meta tensors"):
            torch.ones((), device="meta").item()
