"""The models: shapes, parameters counted by hand, and gradients that reach every parameter."""

from __future__ import annotations

import pytest
import torch

from hvdtrain import leaf
from hvdtrain.models import mlp, resnet, wide_resnet


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
        assert parameters(wide_resnet.build("wide_resnet", (28, 28, channels), 10, widths=widths)) == expected


def test_wide_resnet_halves_twice_and_pools_the_rest() -> None:
    model = wide_resnet.build("wide_resnet", (28, 28, 1), 10)
    sizes = []
    model.wide.register_forward_hook(lambda module, inputs, output: sizes.append(tuple(output.shape)))
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert sizes == [(2, 64, 7, 7)]
    assert [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)] == [0.01] * 6


@pytest.mark.parametrize("shape", [(28, 28, 1), (32, 32, 3), (8, 8, 1), (33, 20, 3)])
@pytest.mark.parametrize("name", ["wide_resnet", "mlp", "linear", "resnet18"])
def test_every_model_takes_every_shape_and_learns_with_all_its_parameters(name: str, shape: tuple[int, int, int]) -> None:
    model = leaf.load("models", name, "here").build(name, shape, 7)
    logits = model(torch.randn(3, shape[2], shape[0], shape[1]))
    assert logits.shape == (3, 7)
    torch.nn.functional.cross_entropy(logits, torch.tensor([0, 3, 6])).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_mlp_layers() -> None:
    model = mlp.build("mlp", (4, 4, 2), 3, widths=(5, 6))
    assert parameters(model) == 32 * 5 + 5 + 5 * 6 + 6 + 6 * 3 + 3


def test_resnet_by_name() -> None:
    assert parameters(resnet.build("resnet50", (224, 224, 3), 1000)) == 25_557_032  # torchvision's published count
    small = resnet.build("resnet18", (32, 32, 3), 10, small_images=True)
    sizes = []
    small.layer1.register_forward_hook(lambda module, inputs, output: sizes.append(tuple(output.shape)))
    small(torch.randn(2, 3, 32, 32))
    assert sizes == [(2, 64, 32, 32)]


def test_wide_resnet_computes_what_it_describes() -> None:
    """Against the same network written out, in evaluation mode with statistics that are not the initial ones."""
    torch.manual_seed(3)
    model = wide_resnet.build("wide_resnet", (8, 12, 3), 5, widths=(4, 4, 6, 8)).double().eval()
    state = {name: torch.rand_like(t, dtype=torch.float64) if t.is_floating_point() else t for name, t in model.state_dict().items()}
    model.load_state_dict(state)
    f = torch.nn.functional

    def convolution(x: torch.Tensor, at: str) -> torch.Tensor:
        x = f.conv2d(x, state[f"{at}.0.weight"], padding=1)
        s = {key: state[f"{at}.1.{key}"].view(1, -1, 1, 1) for key in ("running_mean", "running_var", "weight", "bias")}
        return ((x - s["running_mean"]) / (s["running_var"] + 1e-5).sqrt() * s["weight"] + s["bias"]).clamp(min=0)

    def block(x: torch.Tensor, at: str) -> torch.Tensor:
        scaled = f.conv2d(x, state[f"{at}.scale.weight"], state[f"{at}.scale.bias"]) if f"{at}.scale.weight" in state else x
        return scaled + convolution(convolution(x, f"{at}.first"), f"{at}.second")

    x = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    expected = convolution(x, "stem")
    for group in ("narrow", "middle", "wide"):
        expected = block(block(expected, f"{group}.0"), f"{group}.1")
        expected = expected if group == "wide" else f.max_pool2d(expected, 2)
    expected = expected.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"]
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=0)
    assert {name.rsplit(".", 1)[0] for name in state if ".scale." in name} == {"middle.0.scale", "wide.0.scale"}


def test_mlp_computes_what_it_describes() -> None:
    model = mlp.build("mlp", (2, 3, 2), 4, widths=(5, 6)).double()
    x = torch.randn(3, 2, 2, 3, dtype=torch.float64)
    hidden = x.reshape(3, 12)
    for layer in (model.fc1, model.fc2):
        hidden = (hidden @ layer.weight.T + layer.bias).clamp(min=0)
    torch.testing.assert_close(model(x), hidden @ model.head.weight.T + model.head.bias)
