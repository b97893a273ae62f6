"""Operations, MFU and rates of one device: counted by hand for a linear model, a convolutional one
and gpt; and peaks of GPUs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import of_this_copy
from torch import nn

from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.data.field import Field
from hvdtrain.errors import UserError
from hvdtrain.extras.throughput.device_throughput import DeviceThroughput, with_unit
from hvdtrain.extras.throughput.peaks import peak_tflops
from hvdtrain.extras.throughput.sample_flops import _EagerCounter, sample_flops
from hvdtrain.frameworks.learner import Gpu
from hvdtrain.frameworks.torch.step_costs import FlopCounter
from hvdtrain.tasks.language import Language
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.telemetry.throughput import measure_throughput

HERE = f"model.name={__name__}"


class Small(nn.Module):
    """Two convolutions and a linear layer, for images of 8 x 8."""

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1),  # to 3 x 8 x 8
            nn.BatchNorm2d(3),
            nn.ReLU(),
            nn.Conv2d(3, 4, 3, stride=2),  # to 4 x 3 x 3
            nn.Flatten(),
            nn.Linear(4 * 3 * 3, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


class ReadsNumbers(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if x.sum().item() > -1.0 else 0.0)


class Draws(Small):
    """From every generator, in its constructor and in each pass."""

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__(shape, classes)
        self.start = random.random() + np.random.rand()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = random.random() + np.random.rand() + torch.rand(())
        return super().forward(x) + noise


CONV_1 = 2 * 3 * 3 * 1 * 3 * 8 * 8  # a multiply-add is two operations
CONV_2 = 2 * 3 * 3 * 3 * 4 * 3 * 3
LINEAR = 2 * 36 * 10
# the gradient of a layer's weights costs what its outputs do, and so does that of its inputs, which
# the first layer does not compute
OF_SMALL = 2 * CONV_1 + 3 * CONV_2 + 3 * LINEAR


def counted(*words: str, is_small: bool) -> float:
    config = configure(None, list(words))
    return sample_flops(config, open_datasets(config).task, is_small=is_small)


@pytest.mark.parametrize(
    ("words", "flops"),
    [
        (("model.name=linear",), 2 * 2 * 64 * 10),
        ((f"{HERE}:Small",), OF_SMALL),
        *(((f"{HERE}:Small", word), OF_SMALL) for word in of_this_copy(["norm.kind=sync"])),
        # frozen layers: neither their gradients nor those of their outputs
        (
            (f"{HERE}:Small", 'model.freeze=["layers.0*","layers.1*"]'),
            CONV_1 + 2 * CONV_2 + 3 * LINEAR,
        ),
        (("model.name=mlp", "model.widths=[16,8]"), 2 * 2 * 64 * 16 + 3 * 2 * (16 * 8 + 8 * 10)),
    ],
)
def test_operations_of_a_sample_by_hand(words: tuple[str, ...], flops: int) -> None:
    """The same on numbers and without them."""
    for is_small in (True, False):
        assert counted(*words, is_small=is_small) == flops


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_operations_of_gpt_by_hand(recompute: str) -> None:
    """Each matrix product three times: the outputs, and two gradients; attention has two products
    of (T, T, C) forward and four backward. What is computed again does not count."""
    context, vocabulary, layers, width = 6, 11, 2, 8
    options = {"model.layers": layers, "model.heads": 2, "model.width": width}
    words = [f"{key}={value}" for key, value in options.items()]
    words += ["model.name=gpt", "task.name=language", f"model.recompute={recompute}"]
    task = Language(Field("int64", (context + 1,), vocabulary))
    block = 2 * context * (3 * width + width + 4 * width + 4 * width) * width
    attention = 2 * 2 * context * context * width
    head = 2 * context * width * vocabulary
    for is_small in (True, False):
        found = sample_flops(configure(None, words), task, is_small=is_small)
        assert found == 3 * (layers * (block + attention) + head)


def test_numbers_are_needed_or_not() -> None:
    assert counted(f"{HERE}:ReadsNumbers", is_small=True) == OF_SMALL
    with pytest.raises(UserError, match=r"ReadsNumbers cannot be called without numbers: "):
        counted(f"{HERE}:ReadsNumbers", is_small=False)


def test_counting_draws_no_random_numbers_and_changes_no_model() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), float(torch.rand(()))

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    expected = draw()
    for is_small in (True, False):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(5)
        assert counted(f"{HERE}:Draws", is_small=is_small) == OF_SMALL
        assert draw() == expected


def test_counting_loads_no_compiler() -> None:
    """torch wraps other modes in what loads it at their first operation: more than a second of each
    start."""
    assert hasattr(FlopCounter.__torch_dispatch__, "__wrapped__")
    assert not hasattr(_EagerCounter.__torch_dispatch__, "__wrapped__")


def test_figures_of_one_device() -> None:
    """2,000 samples a second of 10^9 operations on 4 devices: 0.5 TFLOP/s each."""
    found = DeviceThroughput(4, 1e9, "", 2.0, "speed.peak_tflops")
    rates = {"samples_per_s": 2000.0, "tokens_per_s": 8000.4}
    fields = found.of_device(rates)
    assert fields == {
        "device_samples_per_s": 500.0,
        "device_tokens_per_s": 2000.0,
        "device_tflops": 0.5,
        "mfu": 0.25,
    }
    assert found.words(fields) == "500 GFLOP/s (25.0% MFU) of each of 4 devices"
    assert found.header_lines() == [
        "flops   1 GFLOP a sample, forward and backward; MFU of 2 TFLOP/s (speed.peak_tflops)"
    ]
    without = DeviceThroughput(1, 1.5e6, "", None, "why not")
    assert without.of_device({"samples_per_s": 3.0}) == {
        "device_samples_per_s": 3.0,
        "device_tflops": 4.5e-6,
    }
    assert without.header_lines(["GPU utilization by NVML"]) == [
        "flops   1.5 MFLOP a sample, forward and backward; no MFU: why not; GPU utilization by NVML"
    ]
    unknown = DeviceThroughput(2, None, "the reason")
    assert unknown.header_lines() == ["flops   not counted: the reason"]
    assert unknown.of_device({"samples_per_s": 3.0}) == {"device_samples_per_s": 1.5}
    assert unknown.words({}) == ""
    for rate in (None, 0.0, math.nan, math.inf):
        assert found.of_device({"samples_per_s": rate}) == {}
    assert [with_unit(flops) for flops in (2.5e15, 1e12, 8.1777e9, 640.0)] == [
        *("2.5 PFLOP", "1 TFLOP", "8.18 GFLOP", "0.64 kFLOP"),
    ]


@pytest.mark.parametrize(
    ("name", "number_type", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5),
        ("NVIDIA H100 PCIe", "float16", 756.5),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),
        ("NVIDIA H200", "float32", 494.5),
        ("NVIDIA GH200 480GB", "float64", 67),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312),
        ("NVIDIA A100 80GB PCIe", "float32", 156),
        ("NVIDIA L40S", "bfloat16", 362),
        ("NVIDIA L40", "bfloat16", 181),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA A10G", "bfloat16", None),  # less than an A10
        ("NVIDIA GB200", "bfloat16", None),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("Tesla T4", "float32", 8.1),
        ("AMD Instinct MI250X", "bfloat16", 191.5),
        ("AMD Instinct MI300X", "float32", 163.4),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        ("AMD EPYC 7763", "float32", None),
    ],
)
def test_peaks_by_the_name_of_a_gpu(name: str, number_type: str, tflops: float | None) -> None:
    assert peak_tflops(name, number_type) == tflops


class OneGpu:
    """A learner whose device is a GPU that NVML does not know."""

    number_type = "bfloat16"

    def gpu(self) -> Gpu:
        return Gpu("", "no driver", "NVIDIA H200", lambda: 0)


def test_what_rank_0_says_of_its_model_and_gpu() -> None:
    config = configure(None, ["model.name=linear"])
    task = open_datasets(config).task
    alone = SingleProcessCommunicator()
    learner: Any = OneGpu()
    found = measure_throughput(config, task, alone, learner, is_small=True)
    assert found == DeviceThroughput(1, 2560.0, "", 989.5, "NVIDIA H200, bfloat16")
    for words, why in (
        (["framework=numpy", "model.name=linear"], "framework=numpy does not count them"),
        (["model.thaw=[{at: 1, names: ['*']}]"], "model.thaw changes their number during the job"),
    ):
        other = measure_throughput(configure(None, words), task, alone, learner, is_small=True)
        assert (other.flops, other.why_no_flops) == (None, why)


def test_events_header_and_report_of_a_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = [*("model.name=linear", "epochs=1", "speed.device=cpu", "comm.engine=single")]
    assert main([*words, "speed.peak_tflops=0.001", f"run={run}"]) == 0
    said = capsys.readouterr().out
    peak = "MFU of 0.001 TFLOP/s (speed.peak_tflops)"
    assert f"flops   2.56 kFLOP a sample, forward and backward; {peak}" in said
    assert "FLOP/s (" in said and "% MFU)" in said
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    start = next(event for event in events if event["kind"] == "start")
    assert (start["devices"], start["flops_per_sample"], start["peak_tflops"]) == (1, 2560, 0.001)
    for event in events:
        if event["kind"] in ("step", "epoch", "end"):
            tflops = 2560 * event["samples_per_s"] / 1e12
            assert event["device_tflops"] == pytest.approx(tflops, rel=1e-3)
            assert event["mfu"] == pytest.approx(1000 * tflops, rel=1e-3)
            assert event["device_samples_per_s"] == pytest.approx(event["samples_per_s"], rel=1e-3)
            assert "gpu_percent" not in event
