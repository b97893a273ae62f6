"""CUDA_VISIBLE_DEVICES: what it shows to CUDA, and which part of a divided GPU a rank takes. There
is no GPU here: of its documentation."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hvdtrain.cli.check import dry_run
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.comm.driver_files import HERE, DriverFiles
from hvdtrain.comm.launcher_variables import (
    VISIBLE_DEVICES,
    Placement,
    listed_devices,
    take_part_of_gpu,
)
from hvdtrain.config.read import configure
from hvdtrain.frameworks.torch.device import describe_device, gpu, pick_device
from hvdtrain.training.build import connect
from hvdtrain.training.telemetry.energy import Unmeasured, gpu_counter

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
    ],
)
def test_a_list_ends_where_cuda_stops_reading(listed: str, expected: list[str]) -> None:
    environ = {VISIBLE_DEVICES: listed}
    assert listed_devices(environ) == expected and HERE.visible_nvidia(environ) == len(expected)


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


class Gpus:
    """torch.cuda of a process that sees so many GPUs."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        count: int,
        name: str,
        uuid: str,
        hip: str | None = None,
    ) -> None:
        self.chosen: list[torch.device] = []
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)
        monkeypatch.setattr("torch.cuda.set_device", self.chosen.append)
        monkeypatch.setattr(
            "torch.cuda.get_device_properties",
            lambda device: SimpleNamespace(name=name, uuid=uuid, total_memory=1),
        )
        monkeypatch.setattr("torch.version.hip", hip)


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


def test_a_part_of_a_gpu_has_no_counter_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 1, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "41b3359c")
    found = gpu(CUDA)
    assert found and found.uuid == PARTS[0]
    with pytest.raises(
        Unmeasured, match=r"MIG-41b3359c is a part of a GPU \(MIG\), and NVML counts whole ones"
    ):
        gpu_counter(found.uuid, found.why)


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
    of_check = dry_run.pick_device(configure(None, []), SingleProcessCommunicator())
    assert (of_check["name"], of_check["model"]) == (
        "cuda:0",
        "AMD Instinct MI300X (ROCm 6.4.43484)",
    )
