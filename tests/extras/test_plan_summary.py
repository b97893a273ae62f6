"""hvdtrain summary: its numbers beside torch's own, frozen parameters, a framework that counts
nothing, models that cannot be called."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from plan_command import without_data
from ranks import needs_extra
from torch.utils.flop_counter import FlopCounterMode

from hvdtrain.__main__ import main
from hvdtrain.core.import_torchvision import import_torchvision


def told(capsys: Any, *words: str) -> str:
    assert main(["summary", *words]) == 0
    return str(capsys.readouterr().out)


class ReadsNumbers(torch.nn.Module):
    """Decides by a number that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x.flatten(1))
        return y if float(y.sum()) > 0 else -y


def test_the_numbers_are_those_of_torch(capsys: Any) -> None:
    words = [
        *without_data(1000, "64x64x3", 10),
        "model.name=torchvision.models:resnet18",
        "model.num_classes=10",
        "--json",
        "-",
    ]
    found, model = (
        json.loads(told(capsys, *words)),
        import_torchvision().models.resnet18(num_classes=10),
    )
    counter = FlopCounterMode(display=False)
    with counter:
        model.eval()(torch.zeros(1, 3, 64, 64))
    assert found["flops"] == counter.get_total_flops()
    assert found["parameters"] == found["trained"] == sum(p.numel() for p in model.parameters())
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert (
        layers["layer2.0.conv1"]["outputs"] == [128, 8, 8]
        and layers["layer2.0.conv1"]["kind"] == "Conv2d"
    )
    assert list(layers) == [
        name for name, module in model.named_modules() if list(module.parameters(recurse=False))
    ]


def test_a_table_with_what_is_frozen(capsys: Any) -> None:
    said = told(capsys, "model.name=convnet", "model.widths=[4]", "model.freeze=['conv*']")
    rows = {line.split()[0]: line.split() for line in said.splitlines() if line}
    assert rows["conv1"][1:5] == ["Conv2d", "4x4x4", "36", "0"] and rows["fc"][3:5] == ["50", "50"]
    assert "94 parameters, 58 of them trained" in said


def test_operations_of_a_module_without_parameters_of_its_own(capsys: Any) -> None:
    """The products of attention, of 16 queries with 16 keys of 8 numbers and of their shares with
    the values, are of the module itself."""
    words = (
        "data.name=digit_tokens:windows data.levels=8 data.side=4 task.name=language "
        "model.name=gpt model.layers=1 model.heads=2 model.width=8"
    )
    rows = {
        layer["name"]: layer
        for layer in json.loads(told(capsys, *words.split(), "--json", "-"))["layers"]
    }
    attention = rows["blocks.0.attention"]
    assert (attention["parameters"], attention["flops"], attention["outputs"]) == (
        0,
        2 * (2 * 16 * 16 * 8),
        [16, 8],
    )
    assert rows["blocks.0.fc1"]["flops"] == 2 * 16 * 8 * 32


@pytest.mark.parametrize("framework", ["jax", "numpy"])
def test_other_frameworks_show_their_parameters(framework: str, capsys: Any) -> None:
    said = told(capsys, f"framework={framework}", "model.name=linear")
    assert (
        f"650 parameters, all of them trained; framework={framework} has counted no operations"
        in said
    )


def test_a_model_that_reads_numbers(capsys: Any) -> None:
    assert main(["summary", "model.name=test_plan_summary:ReadsNumbers"]) == 2
    assert "cannot run on tensors without data" in capsys.readouterr().err


@needs_extra("libraries")
def test_layers_of_a_model_whose_first_weights_are_drawn_until_they_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those of a truncated normal distribution: `summary` has tensors without numbers, and `plan
    --memory` too."""
    import timm

    sizes = {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 16, "num_heads": 2}
    net = timm.create_model("vit_tiny_patch16_224", num_classes=10, in_chans=1, **sizes)
    words = [
        "model.name=timm:vit_tiny_patch16_224",
        *(f"model.{option}={value}" for option, value in sizes.items()),
    ]
    assert main(["summary", *words]) == 0
    assert (
        f"{sum(p.numel() for p in net.parameters()):,} parameters, all of them trained"
        in capsys.readouterr().out
    )
    assert main(["plan", "--memory", *words]) == 0
