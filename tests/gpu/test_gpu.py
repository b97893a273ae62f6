"""On one NVIDIA GPU: the curves of a CPU, ranks that share it, NCCL, Horovod's calls, shards, own
loops, and the same bits again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from invariance import JOBS
from pool import alone, on_ranks
from ranks import Result, mpirun, python
from safetensors.numpy import load_file
from same_curve import check_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]

DROPS = "torch wide_resnet"  # dropout draws from the generator of the device and the rank
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}


def finished(size: int, *argv: str, env: dict[str, str] | None = None) -> Result:
    words = list(argv)
    result = (
        mpirun(size, words, timeout_s=250, env=env)
        if size
        else python(words, timeout_s=250, env=env)
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def of_a_gpu() -> dict[str, Any]:
    return curves("single", 0)


def curves(engine: str, size: int, *how: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    return dict(on_ranks(engine, size or 1, "invariance:curves", engine, *how, env=env)[0])


def test_a_gpu_computes_what_a_cpu_does(of_a_gpu: dict[str, Any]) -> None:
    of_a_cpu = curves("single", 0, env=HIDDEN)
    assert of_a_gpu.keys() == of_a_cpu.keys() == JOBS.keys()
    for job in JOBS.keys() - {DROPS}:
        check_same(job, of_a_gpu[job], of_a_cpu[job])


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_share_a_gpu_compute_what_one_does(of_a_gpu: dict[str, Any], size: int) -> None:
    found = curves("mpi", size, "few_jax")
    for job in found.keys() - {DROPS}:
        check_same(job, found[job], of_a_gpu[job])


def test_nccl_refuses_two_ranks_on_one_gpu_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    result = mpirun(2, ["-m", "hvdtrain", "comm.engine=torchdist", f"run={tmp_path / 'run'}"])
    assert result.returncode == 2
    assert (
        "ranks 0, 1 on" in result.stderr
        and "train on one GPU" in result.stderr
        and "comm.engine=mpi" in result.stderr
    )


def test_mpi_reduces_what_the_gpu_fills_later_while_the_host_goes_on() -> None:
    for notes, went_on, wrong in on_ranks("mpi", 2, "device_memory_on_ranks:on_gpu"):
        assert len(notes) == 1 and notes[0].startswith("GPU tensors ") and went_on and not wrong, (
            notes,
            wrong,
        )


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_header_says_how_mpi_takes_tensors_and_host_memory_can_be_asked_for(
    tmp_path: Path, stage: int
) -> None:
    out = train(
        tmp_path / "run",
        2,
        "comm.engine=mpi",
        "comm.device_memory=host",
        f"shard.stage={stage}",
        "speed.precision=bf16",
    )
    assert (
        "GPU tensors go through page-locked host memory: comm.device_memory=host" in out
        and "on cuda:0" in out
    )


def test_parts_are_reduced_and_gathered_by_nccl() -> None:
    assert on_ranks("torchdist", 1, "one_call_on_ranks:on_gpu") == [True]


@pytest.mark.parametrize(
    ("engine", "size"), [("mpi", 2), ("mpi", 4), ("torchdist", 1), ("single", 0)]
)
def test_horovods_calls_take_tensors_of_a_gpu(tmp_path: Path, engine: str, size: int) -> None:
    out = tmp_path / "out.json"
    env = {"HVDTRAIN_ENGINE": engine, "HVDTRAIN_TEST_DEVICE": "cuda"}
    finished(size, "tests/support/horovod_checks.py", "hvdtrain.horovod", str(out), env=env)
    failures = json.loads(out.read_text())
    assert len(failures) > 100 and not any(failures.values()), {
        name: failure for name, failure in failures.items() if failure
    }


def test_horovods_calls_on_tensors_that_stay_on_the_gpu(tmp_path: Path) -> None:
    """What two GPUs do by NCCL, by Gloo on one."""
    out = tmp_path / "out.json"
    env = {"HVDTRAIN_ENGINE": "torchdist", "HVDTRAIN_TEST_DEVICE": "cuda"}
    finished(
        2,
        "tests/support/gloo_on_gpu.py",
        "tests/support/horovod_checks.py",
        "hvdtrain.horovod",
        str(out),
        env=env,
    )
    failures = json.loads(out.read_text())
    assert len(failures) > 100 and not any(failures.values()), {
        name: failure for name, failure in failures.items() if failure
    }


@pytest.mark.parametrize(
    "fusion_bytes", ["67108864", "1000"], ids=["made by who waits", "made by a thread"]
)
@pytest.mark.parametrize("engine", ["mpi", "torchdist"])
def test_collectives_follow_the_scripts_streams(engine: str, fusion_bytes: str) -> None:
    program = ["tests/support/gloo_on_gpu.py"] * (engine == "torchdist") + [
        "tests/support/streams_on_gpu.py"
    ]
    result = finished(
        2, *program, env={"HVDTRAIN_ENGINE": engine, "HOROVOD_FUSION_THRESHOLD": fusion_bytes}
    )
    assert result.stdout.count("in order") == 2


def test_adasum_of_tensors_that_stay_on_the_gpu() -> None:
    assert finished(2, "tests/support/adasum_on_gpu.py").stdout.count("as by the formula") == 2


@pytest.mark.parametrize("how", ["few", "muon"])
def test_shards_of_a_state_on_a_gpu(tmp_path: Path, how: str) -> None:
    jobs = {}
    for size, engine, stages in (
        (0, "single", "0"),
        (2, "mpi", "1,2" if how == "muon" else "1,2,3"),
    ):
        jobs[size] = on_ranks(
            engine, size or 1, "shards_on_ranks:curves", str(tmp_path), stages, how
        )[0]
    jobs[2].pop("averaged", None)
    assert len(jobs[2]) >= 4
    for name, job in jobs[2].items():
        if not name.startswith(
            "resnet"
        ):  # whose running statistics are those of each rank's own samples
            check_same(name, job, jobs[0][f"{name.rpartition(',')[0]}, stage 0"])


def weights(run: Path) -> dict[str, np.ndarray]:
    newest = sorted((run / "checkpoints").iterdir())[-1]
    return {
        name: array
        for file in newest.glob("*.safetensors")
        for name, array in load_file(file).items()
    }


def train(run: Path, size: int, *words: str, steps: int = 12) -> str:
    return finished(
        size,
        "-m",
        "hvdtrain",
        f"run={run}",
        "epochs=2",
        f"max_steps={steps}",
        "batch.size=50",
        *words,
    ).stdout


def test_images_with_their_weights_sharded(tmp_path: Path) -> None:
    """Convolutions, whose weights are in channels_last order without shards."""
    words = (
        "model.name=convnet",
        "model.widths=[4,6]",
        "speed.precision=fp64",
        "optim.base_lr=0.1",
        "comm.engine=mpi",
    )
    for stage in (0, 3):
        assert "on cuda:0" in train(tmp_path / str(stage), 2, *words, f"shard.stage={stage}")
    one = weights(tmp_path / "0")
    sharded = weights(tmp_path / "3")
    assert one.keys() == sharded.keys() and any(array.ndim == 4 for array in one.values())
    for name, array in one.items():
        np.testing.assert_allclose(sharded[name], array, rtol=1e-11, atol=1e-13, err_msg=name)


@pytest.mark.parametrize(
    "words",
    [
        ["model.name=wide_resnet", "model.widths=[8,16,16,16]"],
        [
            "model.name=wide_resnet",
            "model.widths=[8,16,16,16]",
            "speed.precision=bf16",
            "norm.kind=ghost",
            "norm.ghost=10",
        ],
        ["model.name=mlp", "optim.name=lamb", "recipe.gradient_noise=0.01"],
        [
            *(
                "model.name=airbench",
                "data.name=synthetic",
                "data.shape=[32,32,3]",
                "optim.name=muon",
                "evaluate.views=6",
            ),
            *(
                "augment.crop=2",
                "augment.rand_augment=2",
                "augment.color_jitter=[0.4,0.4,0.4,0.1]",
                "augment.erase=0.5",
                "augment.cutmix=1.0",
            ),
        ],
        [
            "task.name=language",
            "data.name=image_tokens",
            "model.name=gpt",
            "optim.name=adamw",
            "speed.precision=bf16",
        ],
    ],
    ids=["wide_resnet", "ghost norm in bf16", "lamb", "airbench", "gpt"],
)
def test_a_resumed_job_is_the_same_to_the_last_bit(tmp_path: Path, words: list[str]) -> None:
    """With speed.deterministic; interrupted in the middle of an epoch."""
    words = [*words, "speed.deterministic=true"]
    straight = tmp_path / "straight"
    halves = tmp_path / "halves"
    train(straight, 0, *words)
    train(halves, 0, *words, steps=5)
    train(halves, 0, *words)
    one = weights(straight)
    other = weights(halves)
    assert one.keys() == other.keys()
    assert [name for name, array in one.items() if not np.array_equal(array, other[name])] == []


def test_an_operation_without_a_deterministic_kernel_is_named(tmp_path: Path) -> None:
    (tmp_path / "pooled.py").write_text(
        "import torch\n\n\ndef pooled():\n    head = torch.nn.Flatten(), torch.nn.Linear(4, 10)\n"
        "    return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.AdaptiveMaxPool2d(1), "
        "*head)\n"
    )
    words = [
        "model.name=pooled:pooled",
        "max_steps=2",
        f"run={tmp_path / 'run'}",
        "speed.deterministic=true",
    ]
    result = python(["-m", "hvdtrain", *words], env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert (
        "torch has no deterministic adaptive_max_pool2d_backward_cuda" in result.stderr
        and "speed.deterministic=false" in result.stderr
    )


@pytest.mark.parametrize(
    ("size", "how"), [(0, []), (2, ["comm.engine=mpi"]), (2, ["comm.engine=mpi", "shard.stage=2"])]
)
def test_a_loop_of_ones_own(tmp_path: Path, size: int, how: list[str]) -> None:
    found = {}
    for name, ranks, words, env in (("cpu", 0, [], HIDDEN), ("gpu", size, how, {})):
        out = tmp_path / f"{name}.json"
        finished(
            ranks,
            *alone("own_loop_on_ranks:main", str(out), *words, f"run={tmp_path / name}"),
            env=env,
        )
        found[name] = json.loads(out.read_text())
    for name, array in found["cpu"]["weights"].items():
        np.testing.assert_allclose(found["gpu"]["weights"][name], array, rtol=1e-11, atol=1e-13)
    assert found["gpu"]["losses"] == pytest.approx(found["cpu"]["losses"], rel=1e-11)


def test_a_loop_of_ones_own_with_a_grad_scaler(tmp_path: Path) -> None:
    assert (
        "all as computed by hand"
        in finished(3, *alone("context_on_ranks:main", str(tmp_path / "run"), "")).stdout
    )
