"""CUDA_VISIBLE_DEVICES: what it shows to CUDA, and which part of a divided GPU a rank takes. There
is no GPU here: of its documentation."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from faked_gpus import Gpus

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.comm.driver_files import DriverFiles
from hvdtrain.comm.launcher_variables import (
    VISIBLE_DEVICES,
    Placement,
    listed_devices,
    take_part_of_gpu,
)
from hvdtrain.config.read import configure
from hvdtrain.errors import UserError
from hvdtrain.frameworks.jax.build import pick_device as pick_device_of_jax
from hvdtrain.frameworks.torch.device import describe_device, fork_rng, gpu, pick_device
from hvdtrain.training.build import connect

GPU_A = "GPU-5f3c1b0e"
GPU_B = "GPU-8a2d"
PARTS = [f"MIG-{name}" for name in ("41b3359c", "f6bb8763", "9c0c2f6a")]
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("4,5", ["4", "5"]),
        (f"{GPU_A}, {GPU_B}", [GPU_A, GPU_B]),
        (",".join(PARTS), PARTS),
        ("", []),
        ("-1", []),
        ("1,-1,2", ["1"]),  # "only the devices whose index precedes the invalid index are visible"
        ("0,,2", ["0"]),
        ("NoDevFiles", []),  # SLURM's word on nodes without a GPU for the job
    ],
)
def test_a_list_ends_where_cuda_stops_reading(listed: str, expected: list[str]) -> None:
    environ = {VISIBLE_DEVICES: listed}
    assert listed_devices(environ) == expected and DriverFiles().visible_nvidia(environ) == len(
        expected
    )


def host_with_gpus(tmp_path: Path, *numbers: int, amd: bool = False) -> DriverFiles:
    for number in numbers:
        (tmp_path / f"nvidia{number}").touch()
    nodes = tmp_path / "class/kfd/kfd/topology/nodes/1"
    nodes.mkdir(parents=True)
    (nodes / "properties").write_text(f"simd_count {440 * amd}\n")
    return DriverFiles(dev=tmp_path, sys=tmp_path)


@pytest.mark.parametrize(
    ("build", "listed", "what", "fix"),
    [
        (
            {},
            None,
            "nvidia4 and 1 more), but torch {} sees none: it is built for CPUs",
            "a torch that is built for them",
        ),
        (
            {"cuda": "12.8"},
            "0,1",
            "nvidia4 and 1 more), but torch {} sees none, although it is built for CUDA 12.8",
            "to use them: a driver that supports this build",
        ),
        (
            {"hip": "6.4"},
            None,
            "kfd), but torch {} sees none, although it is built for ROCm 6.4",
            "to use them: a driver that supports this build",
        ),
    ],
)
def test_a_host_whose_gpus_torch_does_not_see_is_no_cpu(
    build: dict[str, str],
    listed: str | None,
    what: str,
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """speed.device=auto would train on the CPU, and say so in one word."""
    files = host_with_gpus(tmp_path, 4, 5, amd=True)
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    if listed is not None:
        monkeypatch.setenv(VISIBLE_DEVICES, listed)
    for name in ("cuda", "hip"):
        monkeypatch.setattr(f"torch.version.{name}", build.get(name))
    alone = SingleProcessCommunicator()
    with pytest.raises(UserError) as caught:
        pick_device(configure(None, []), alone, files)
    assert caught.value.what.startswith(f"this host has GPUs ({tmp_path}/")
    assert what.format(torch.__version__) in caught.value.what
    assert caught.value.where == "speed.device, default"
    assert caught.value.fix.startswith("speed.device=cpu to train on the CPU; ")
    assert fix in caught.value.fix
    assert pick_device(configure(None, ["speed.device=cpu"]), alone, files) == torch.device("cpu")


@pytest.mark.parametrize("hides", ["", "-1", "NoDevFiles"])
def test_gpus_that_are_hidden_on_purpose_are_not_missed(
    hides: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE_DEVICES, hides)
    files = host_with_gpus(tmp_path, 0)
    assert pick_device(configure(None, []), SingleProcessCommunicator(), files).type == "cpu"


def test_the_graphics_of_a_processor_are_no_gpu_to_train_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMD's driver has the same files for them. A torch for the CPU is right there."""
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    files = host_with_gpus(tmp_path, amd=True)
    assert pick_device(configure(None, []), SingleProcessCommunicator(), files).type == "cpu"


def test_jax_does_not_miss_gpus_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    files = host_with_gpus(tmp_path, 0)
    cpu = SimpleNamespace(platform="cpu")
    jax = SimpleNamespace(
        __version__="0.10.2",
        config=SimpleNamespace(jax_platforms=None),
        local_devices=lambda backend=None: [cpu],
    )
    alone = SingleProcessCommunicator()
    config = configure(None, ["framework=jax"])
    with pytest.raises(UserError) as caught:
        pick_device_of_jax(jax, config, alone, files)
    assert caught.value.what == (
        f"this host has GPUs ({tmp_path}/nvidia0), but jax 0.10.2 sees none"
    )
    assert "pip install 'jax[cuda12]'" in caught.value.fix
    on_cpu = configure(None, ["framework=jax", "speed.device=cpu"])
    assert pick_device_of_jax(jax, on_cpu, alone, files) is cpu
    jax.config.jax_platforms = "cpu"  # JAX_PLATFORMS=cpu
    assert pick_device_of_jax(jax, config, alone, files) is cpu


def test_a_container_may_see_devices_of_any_number(tmp_path: Path) -> None:
    """CUDA numbers them from 0, so a sweep gives its trials 0 and 1."""
    assert listed_devices({}) is None
    for name in ("nvidia4", "nvidia5", "nvidiactl", "nvidia-uvm", "nvidia-caps", "nvidia-modeset"):
        (tmp_path / name).touch()
    assert DriverFiles(dev=tmp_path).nvidia() == 2


def placed(local_rank: int, size: int) -> Placement:
    return Placement(
        rank=local_rank, size=size, local_rank=local_rank, local_size=size, launcher="mpirun"
    )


@pytest.mark.parametrize(
    ("listed", "taken"),
    [
        (",".join(PARTS), [PARTS[0], PARTS[1], PARTS[2], PARTS[0]]),
        (PARTS[1], [PARTS[1]] * 4),  # of a launcher that gives each rank its own
        ("4,5", ["4,5"] * 4),  # a rank chooses among whole GPUs by their number
        (f"{GPU_A},{GPU_B}", [f"{GPU_A},{GPU_B}"] * 4),
        (None, [None] * 4),
    ],
)
def test_a_rank_takes_its_part_of_a_divided_gpu(
    listed: str | None, taken: list[str | None]
) -> None:
    """CUDA shows a process one part alone."""
    for local_rank, expected in enumerate(taken):
        environ = {} if listed is None else {VISIBLE_DEVICES: listed}
        take_part_of_gpu(placed(local_rank, 4), environ)
        assert environ.get(VISIBLE_DEVICES) == expected
        take_part_of_gpu(placed(local_rank, 4), environ)
        assert environ.get(VISIBLE_DEVICES) == expected, "once more changes nothing"


def test_a_job_takes_its_part_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE_DEVICES, ",".join(PARTS))
    connect(configure(None, ["comm.engine=single"]), placed(0, 1))
    assert os.environ[VISIBLE_DEVICES] == PARTS[0]


@pytest.mark.parametrize(
    ("count", "local_rank", "number"), [(2, 0, 0), (2, 1, 1), (1, 1, 0), (2, 2, 0)]
)
def test_a_rank_takes_the_gpu_of_its_local_rank_among_those_it_sees(
    monkeypatch: pytest.MonkeyPatch, count: int, local_rank: int, number: int
) -> None:
    """Of /dev/nvidia4 and 5 these are 0 and 1; with one for each rank, as by srun
    --gpus-per-task=1, it is 0 on every rank."""
    gpus = Gpus(monkeypatch, count, "NVIDIA H100", "a")
    communicator = SingleProcessCommunicator()
    communicator.local_rank = local_rank
    assert (
        pick_device(configure(None, []), communicator)
        == torch.device("cuda", number)
        == gpus.chosen[0]
    )


def test_nvml_is_asked_for_the_uuid_not_for_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 1, "NVIDIA H100 80GB HBM3", "5f3c1b0e")
    found = gpu(CUDA)
    assert found and (found.uuid, found.why) == (GPU_A, "") and describe_device(CUDA) == "cuda:0"


def test_a_gpu_of_amd_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls it cuda."""
    Gpus(monkeypatch, 1, "AMD Instinct MI300X", "34aa", hip="6.4.43484")
    found = gpu(CUDA)
    assert (
        found
        and found.uuid == ""
        and "AMD's" in found.why
        and describe_device(CUDA) == "cuda:0 (ROCm 6.4.43484)"
    )
    assert describe_device(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize("words", [[], ["speed.device=xpu"]])
def test_a_gpu_of_intel_is_taken_and_called_so(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = Gpus(monkeypatch, 6, "Intel(R) Data Center GPU Max 1550", "34aa", kind="xpu")
    communicator = SingleProcessCommunicator()
    communicator.local_rank = 7
    device = pick_device(configure(None, words), communicator)
    assert device == torch.device("xpu", 1) == gpus.chosen[0]
    assert describe_device(device) == "xpu:1 (Intel)"
    found = gpu(device)
    assert found and found.uuid == "" and "Intel's" in found.why


@pytest.mark.parametrize("words", [[], ["speed.device=xpu"]])
def test_a_gpu_without_float64_is_an_error(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a job on the CPU that says nothing."""
    Gpus(monkeypatch, 1, "Intel(R) Arc(TM) A770", "1", kind="xpu")
    found = SimpleNamespace(name="Intel(R) Arc(TM) A770", has_fp64=False)
    monkeypatch.setattr("torch.xpu.get_device_properties", lambda device: found)
    with pytest.raises(UserError, match=r"A770 has no float64.*\n.*\n  fix: speed.device=cpu"):
        pick_device(configure(None, words), SingleProcessCommunicator())


@pytest.mark.parametrize(("kind", "name"), [("cuda", "CUDA"), ("xpu", "XPU")])
def test_a_gpu_that_is_asked_for_and_not_there(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the other one there."""
    Gpus(monkeypatch, 2, "a GPU", "1", kind="xpu" if kind == "cuda" else "cuda")
    monkeypatch.setattr(f"torch.{kind}.device_count", lambda: 0)
    with pytest.raises(UserError, match=f"no {name} device is visible"):
        pick_device(configure(None, [f"speed.device={kind}"]), SingleProcessCommunicator())


def test_generators_of_the_cpu_are_as_before_a_fork() -> None:
    before = torch.get_rng_state()
    with fork_rng([torch.device("cpu"), torch.device("meta")]):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
