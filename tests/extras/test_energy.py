"""Joules: a counter that ranks share is read once; wrap-around by hand; and the message why nothing
is measured."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faked_gpus import Gpus

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.extras.energy.counters import (
    Claim,
    Counter,
    EnergyCounters,
    Unmeasured,
    find_counters,
    gpu_counter,
)
from hvdtrain.extras.energy.meter import EnergyMeter
from hvdtrain.extras.energy.meter import summary as energy_summary
from hvdtrain.frameworks.torch import device

NO_RAPL = "no /sys/class/powercap/intel-rapl here"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class NVMLError(Exception):
    pass


class FakeNvml:
    """The driver of a machine with some GPUs: this one has none. Counters in millijoules, as
    NVML's."""

    NVMLError: type[Exception] = NVMLError

    def __init__(self, **counters_mj: int) -> None:
        self.counters_mj = {f"GPU-{name}": mj for name, mj in counters_mj.items()}
        self.mig: dict[str, int] = {}
        self.init: Callable[[], None] = lambda: None

    def nvmlInit(self) -> None:
        self.init()

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.counters_mj:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if handle not in self.mig:
            raise NVMLError("Not Supported")
        return [self.mig[handle], 0]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return self.counters_mj[handle]


class Fake(SingleProcessCommunicator):
    """One rank of several: its allgather returns its own value and the given values of the
    others."""

    def __init__(self, rank: int, others: dict[int, Claim]) -> None:
        self.rank, self.size, self._others = rank, len(others) + 1, others  # type: ignore[misc]

    def allgather_object(self, thing: Any) -> list[Any]:
        return [thing if rank == self.rank else self._others[rank] for rank in range(self.size)]


def claim(host: str, gpu: str | None = None, cpu: str = "", why: str = "") -> Claim:
    return Claim(
        host, f"machine of {host}", gpu, {"cpu": cpu} | ({"gpu": why} if gpu or why else {})
    )


def zone(root: Path, name: str, what: str, microjoules: int, most: int = 262_143_328_850) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{what}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    return folder


def add(folder: Path, microjoules: int) -> None:
    file = folder / "energy_uj"
    file.write_text(f"{int(file.read_text()) + microjoules}\n")


def gpus_alone(
    communicator: SingleProcessCommunicator, nvml: FakeNvml, gpu: str, powercap: Path
) -> EnergyCounters:
    return find_counters(communicator, f"GPU-{gpu}", powercap=powercap, nvml=nvml)


def test_a_counter_that_may_have_started_again_twice_is_not_trusted() -> None:
    meter = Counter(iter([10.0, 30.0, 50.0]).__next__, 65536.0)
    assert meter.joules(100.0) == 20.0  # at most 60 kJ in 100 s
    assert math.isnan(meter.joules(110.0))


def test_keeping_up_loses_nothing_and_hides_no_turn() -> None:
    """100 W on a counter of 65 kJ that is read after half an hour: it has started again twice."""
    now = [0.0]
    one = EnergyCounters(
        {"cpu": ""}, {"cpu": [Counter(lambda: 100.0 * now[0] % 65536.0, 65536.0)]}, lambda: now[0]
    )
    for _ in range(180):
        now[0] += 10.0
        one.keep_up()
    assert one.read()["cpu"] == pytest.approx(180000.0)
    now[0] += 1800.0
    assert math.isnan(one.read()["cpu"])


def test_two_packages_without_their_parts_and_the_rest_of_the_machine(tmp_path: Path) -> None:
    one = zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    two = zone(tmp_path, "intel-rapl:1", "package-1", 9_000_000)
    others = [
        zone(tmp_path, "intel-rapl:0:0", "core", 0),
        zone(tmp_path, "intel-rapl:0:1", "package-0-part", 0),
        zone(tmp_path, "intel-rapl:1:0", "dram", 0),
        zone(tmp_path, "intel-rapl:2", "psys", 0),
        zone(tmp_path, "intel-rapl-mmio:0", "package-0", 0),
    ]
    meter = find_counters(SingleProcessCommunicator(), None, powercap=tmp_path, clock=Clock())
    assert meter.reasons == {"cpu": ""}
    add(one, 2_500_000)
    add(two, 1_250_000)
    for other in others:
        add(other, 70_000_000)
    assert meter.read() == {"gpu": 0.0, "cpu": 3.75}
    assert meter.read() == {"gpu": 0.0, "cpu": 0.0}


def test_a_package_that_starts_again_at_zero(tmp_path: Path) -> None:
    folder = zone(tmp_path, "intel-rapl:0", "package-0", 60_000_000, most=65_000_000)
    meter = find_counters(SingleProcessCommunicator(), None, powercap=tmp_path, clock=Clock())
    add(folder, 4_000_000)
    assert meter.read()["cpu"] == 4.0  # at 64 of 65
    add(folder, -63_000_000)
    assert meter.read()["cpu"] == 2.0  # 1 to the end, 1 from 0 on


def test_counters_are_read_once_a_second_and_nothing_is_lost(tmp_path: Path) -> None:
    folder = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    clock = Clock()
    meter = EnergyMeter(
        find_counters(SingleProcessCommunicator(), None, powercap=tmp_path, clock=clock), 0, clock
    )
    joules = []
    watts = []
    for seconds in (0.5, 0.25, 0.5, 0.5, 0.75):
        clock.now += seconds
        add(folder, 1_000_000)
        sums = meter.sync_sums()
        joules.append(sums["joules.cpu"])
        watts.append(meter.update(sums))
    assert joules == [0.0, 2.0, 0.0, 2.0, 0.0], (
        "where the next sync point is expected more than a second after the last reading"
    )
    assert math.isnan(watts[0]) and watts[1:] == [2 / 0.75, 2 / 0.75, 2.0, 2.0]
    assert meter.read_sums()["joules.cpu"] == 1.0


def test_power_is_of_the_time_between_two_readings_of_all_ranks() -> None:
    """Two ranks whose counters take 100 W each; they synchronize every quarter of a second."""
    now = [0.0]
    counters = EnergyCounters(
        {"cpu": ""}, {"cpu": [Counter(lambda: 100.0 * now[0])]}, lambda: now[0]
    )
    meter = EnergyMeter(counters, 0, lambda: now[0])
    due = []
    watts = []
    for _ in range(6):
        now[0] += 0.25
        sums = meter.sync_sums()
        due.append(sums["joules.due"])
        # the other rank reads when this one does
        watts.append(meter.update({**sums, "joules.cpu": 2 * sums["joules.cpu"]}))
    assert due == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert np.isnan(watts[:3]).all() and watts[3:] == [200.0, 200.0, 200.0]


def test_a_gpu_in_millijoules(tmp_path: Path) -> None:
    nvml = FakeNvml(a=1_000, b=0)
    meter = gpus_alone(SingleProcessCommunicator(), nvml, "a", tmp_path)
    assert meter.reasons == {"cpu": f"no {tmp_path}/intel-rapl here", "gpu": ""}
    nvml.counters_mj |= {"GPU-a": 251_500, "GPU-b": 7_000}
    assert meter.read() == {"gpu": 250.5, "cpu": 0.0}


@pytest.mark.parametrize(("rank", "joules"), [(0, 3.0), (1, 0.0), (2, 3.0)])
def test_two_ranks_on_one_gpu_count_it_once(tmp_path: Path, rank: int, joules: float) -> None:
    """Ranks 0 and 1 share GPU a; rank 2 has b. Each counter grows by 3 J: the job takes 6."""
    everyone = [claim("n", "GPU-a"), claim("n", "GPU-a"), claim("n", "GPU-b")]
    nvml = FakeNvml(a=0, b=0)
    communicator = Fake(rank, {other: c for other, c in enumerate(everyone) if other != rank})
    meter = gpus_alone(communicator, nvml, "b" if rank == 2 else "a", tmp_path)
    nvml.counters_mj = dict.fromkeys(nvml.counters_mj, 3_000)
    assert meter.read()["gpu"] == joules


def test_the_packages_of_a_machine_count_once_under_two_host_names(tmp_path: Path) -> None:
    folder = zone(tmp_path / "rapl", "intel-rapl:0", "package-0", 0)
    (tmp_path / "boot_id").write_text("one-machine\n")
    boot_id = tmp_path / "boot_id"
    container = Claim("other-name", "one-machine", None, {"cpu": ""})
    second = find_counters(
        Fake(1, {0: container}), None, powercap=tmp_path / "rapl", boot_id=boot_id
    )
    first = find_counters(
        Fake(0, {1: container}), None, powercap=tmp_path / "rapl", boot_id=boot_id
    )
    other_machine = find_counters(
        Fake(1, {0: claim("elsewhere")}), None, powercap=tmp_path / "rapl", boot_id=boot_id
    )
    add(folder, 8_000_000)
    assert [meter.read()["cpu"] for meter in (first, second, other_machine)] == [8.0, 0.0, 8.0]
    assert first.reasons == second.reasons == {"cpu": ""}


def test_one_host_without_a_counter_and_none_counts(tmp_path: Path) -> None:
    folder = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    nvml = FakeNvml(a=0)
    without = claim(
        "node7", "GPU-z", cpu=NO_RAPL, why="NVML has no counter of GPU-z: Not Supported"
    )
    meter = find_counters(
        Fake(0, {1: without, 2: without, 3: claim("node8", "GPU-y", cpu="x", why="y")}),
        "GPU-a",
        powercap=tmp_path,
        nvml=nvml,
    )
    assert meter.reasons == {
        "gpu": "node7: NVML has no counter of GPU-z: Not Supported (and 1 more host)",
        "cpu": f"node7: {NO_RAPL} (and 1 more host)",
    }
    add(folder, 8_000_000)
    nvml.counters_mj["GPU-a"] = 5_000
    assert meter.read() == {"gpu": 0.0, "cpu": 0.0}


def test_a_reason_that_all_hosts_have_names_none(tmp_path: Path) -> None:
    here = f"no {tmp_path}/intel-rapl here"
    assert find_counters(
        Fake(0, {1: claim("node7", cpu=here)}), None, powercap=tmp_path
    ).reasons == {"cpu": here}


def test_every_rank_derives_the_same_reasons(tmp_path: Path) -> None:
    """Rank 0 has both counters, rank 1 a GPU that the driver does not know and no RAPL, rank 2 no
    GPU and no RAPL."""
    zone(tmp_path / "a", "intel-rapl:0", "package-0", 0)
    places = [("GPU-a", tmp_path / "a"), ("GPU-b", tmp_path / "none"), (None, tmp_path / "none")]
    nvml = FakeNvml(a=0)
    found = list[Claim]()
    whys = []

    class Listening(SingleProcessCommunicator):
        def allgather_object(self, thing: Any) -> list[Any]:
            found.append(thing)
            return [thing]

    for gpu, powercap in places:
        find_counters(Listening(), gpu, powercap=powercap, nvml=nvml)
    for rank, (gpu, powercap) in enumerate(places):
        others = {other: c for other, c in enumerate(found) if other != rank}
        whys.append(find_counters(Fake(rank, others), gpu, powercap=powercap, nvml=nvml).reasons)
    host = found[0].host
    reasons = {
        "gpu": f"{host}: NVML has no counter of GPU-b: Not Found",
        "cpu": f"{host}: no {tmp_path}/none/intel-rapl here",
    }
    assert whys == [reasons] * 3


@pytest.mark.parametrize(
    ("gpu", "gpu_why", "reason"),
    [
        (None, "torch does not tell the UUID", "torch does not tell the UUID"),
        ("MIG-5", "", "MIG-5 is a part of a GPU (MIG), and NVML counts whole ones"),
        ("GPU-parts", "", "GPU-parts is divided (MIG), and NVML counts whole GPUs"),
        ("GPU-gone", "", "NVML has no counter of GPU-gone: Not Found"),
        ("GPU-old", "", "NVML has no counter of GPU-old: Not Supported"),
        ("GPU-whole", "", ""),
    ],
)
def test_why_a_gpu_is_not_measured(
    tmp_path: Path, gpu: str | None, gpu_why: str, reason: str
) -> None:
    class Old(FakeNvml):
        def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
            if handle == "GPU-old":
                raise NVMLError("Not Supported")
            return super().nvmlDeviceGetTotalEnergyConsumption(handle)

    nvml = Old(parts=0, old=0, whole=0)
    nvml.mig = {"GPU-parts": 1, "GPU-whole": 0}
    meter = find_counters(SingleProcessCommunicator(), gpu, gpu_why, powercap=tmp_path, nvml=nvml)
    assert meter.reasons["gpu"] == reason
    nvml.counters_mj = dict.fromkeys(nvml.counters_mj, 2_000)
    assert meter.read()["gpu"] == (0.0 if reason else 2.0)


def test_a_part_of_a_gpu_has_no_counter_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 1, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "41b3359c")
    found = device.gpu(torch.device("cuda", 0))
    assert found and found.uuid == "MIG-41b3359c"
    with pytest.raises(
        Unmeasured, match=r"MIG-41b3359c is a part of a GPU \(MIG\), and NVML counts whole ones"
    ):
        gpu_counter(found.uuid, found.why)


def test_no_driver_and_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NVMLError("NVML Shared Library Not Found")

    nvml = FakeNvml(a=0)
    nvml.init = fail
    assert (
        gpus_alone(SingleProcessCommunicator(), nvml, "a", tmp_path).reasons["gpu"]
        == "NVML has no counter of GPU-a: NVML Shared Library Not Found"
    )
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (
        find_counters(SingleProcessCommunicator(), "GPU-a", powercap=tmp_path).reasons["gpu"]
        == "nvidia-ml-py is not installed: pip install nvidia-ml-py"
    )


def test_the_real_library_says_why_or_measures(tmp_path: Path) -> None:
    """With a driver there is still no such GPU; without one NVML says that."""
    pytest.importorskip("pynvml")
    why = find_counters(
        SingleProcessCommunicator(), "GPU-00000000-0000-0000-0000-000000000000", powercap=tmp_path
    ).reasons["gpu"]
    assert (
        why.startswith("NVML has no counter of GPU-00000000-0000-0000-0000-000000000000: ")
        and len(why) > 70
    )


def test_only_root_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root reads everything, so the kernel's refusal is put in its place here."""
    folder = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    real = Path.read_text

    def refuse(path: Path, *arguments: Any, **options: Any) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    fix = (
        f"an administrator can open it: chmod a+r {tmp_path}/intel-rapl:*/energy_uj, at each "
        "boot, as by a udev rule"
    )
    assert find_counters(SingleProcessCommunicator(), None, powercap=tmp_path).reasons == {
        "cpu": f"{folder}/energy_uj can be read by root only since CVE-2020-8694; {fix}"
    }


def test_a_counter_that_is_no_number(tmp_path: Path) -> None:
    (zone(tmp_path, "intel-rapl:0", "package-0", 0) / "energy_uj").write_text("\n")
    assert (
        find_counters(SingleProcessCommunicator(), None, powercap=tmp_path)
        .reasons["cpu"]
        .startswith(f"cannot read {tmp_path}/intel-rapl: invalid literal")
    )


def test_a_counter_that_fails_in_mid_run_stays_nan(tmp_path: Path) -> None:
    folder = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    nvml = FakeNvml(a=0)
    clock = Clock()
    meter = find_counters(
        SingleProcessCommunicator(), "GPU-a", powercap=tmp_path, nvml=nvml, clock=clock
    )
    was = (folder / "energy_uj").read_text()
    (folder / "energy_uj").unlink()
    nvml.counters_mj["GPU-a"] = 4_000
    joules = meter.read()
    assert joules["gpu"] == 4.0 and math.isnan(joules["cpu"])
    (folder / "energy_uj").write_text(was)
    assert math.isnan(meter.read()["cpu"])
    nvml.counters_mj["GPU-a"] = 100  # the driver was loaded anew: how much is missing is not known
    assert math.isnan(meter.read()["gpu"])


def test_the_line_of_the_header() -> None:
    assert (
        energy_summary({"gpu": "", "cpu": NO_RAPL})
        == f"energy  GPUs by NVML; processors not measured: {NO_RAPL}"
    )
    assert energy_summary({"cpu": ""}) == "energy  processors by RAPL"
