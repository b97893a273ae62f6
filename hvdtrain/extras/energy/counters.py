"""The hardware counters of a job's energy: NVML's of each GPU, RAPL's of each processor package."""

from __future__ import annotations

import math
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hvdtrain.comm.communicator import Communicator

POWERCAP = Path("/sys/class/powercap")
MOST_W = 600.0  # limit for one processor package
KEEP_UP_S = 20.0  # RAPL's counters start again at 0 after 64 to 262 kJ: some minutes under load
# kind -> the measured hardware, and the counter
KINDS = {
    "gpu": ("GPUs", "NVML"),
    "cpu": ("processors", "RAPL"),
}
# AMD processors, too; intel-rapl:0:0 is a part of intel-rapl:0
_ZONE = re.compile(r"intel-rapl:\d+$")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Nvml(Protocol):
    """The part of the module pynvml that is used."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> Any: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...
    def nvmlDeviceGetMigMode(self, handle: Any) -> Sequence[int]: ...
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...


class Claim(NamedTuple):
    """The counters that one rank found; all ranks exchange these."""

    host: str
    machine: str  # the same for two containers on one machine with different host names
    gpu: str | None
    # kind -> "", or why its counter cannot be read here; no "gpu" if this rank uses no GPU
    reasons: dict[str, str]


class Counter:
    """A hardware counter. It wraps to 0 after `modulus` joules; inf: never."""

    def __init__(self, read_j: Callable[[], float], modulus: float = math.inf) -> None:
        self._read_j = read_j
        self._modulus = modulus
        self._last = read_j()

    def joules(self, since_s: float = 0.0) -> float:
        """Joules since the last call, since_s ago. Raises the errors of reading.

        NaN if the counter went backwards because the driver was reloaded, or if it may have wrapped
        more than once.
        """
        now = self._read_j()
        difference = now - self._last
        self._last = now
        if difference < 0:
            difference = difference + self._modulus if math.isfinite(self._modulus) else math.nan
        return difference if since_s * MOST_W < self._modulus else math.nan


class Unmeasured(Exception):
    """The reason that a counter is missing."""


class EnergyCounters:
    """The counters that this rank reads, so that all ranks together read each counter of the job
    once.

    reasons: kind -> "" if it is measured, else why not; the same on all ranks. No "gpu" if no rank
    uses one.
    """

    def __init__(
        self,
        reasons: dict[str, str],
        counters: Mapping[str, Sequence[Counter]],
        clock: Callable[[], float],
    ) -> None:
        self.reasons = reasons
        self._clock = clock
        self._counters = {kind: counters.get(kind, ()) for kind in KINDS}
        self._read_s = clock()
        self._failed: set[str] = set()
        # joules that keep_up() has seen since the last read()
        self._unread = dict.fromkeys(KINDS, 0.0)

    def read(self) -> dict[str, float]:
        """Returns {"gpu": J, "cpu": J} since the last call on this rank; summed over all ranks they
        are the job's.

        0.0 for counters that another rank or no rank reads. After a counter fails, its kind and the
        sum over ranks are NaN.
        """
        self._read_all()
        joules = self._unread
        self._unread = dict.fromkeys(KINDS, 0.0)
        return joules

    def keep_up(self) -> None:
        """Reads counters between two distant reads, so that none wraps twice unnoticed. Takes 0.1
        us if it is not due yet."""
        if self._clock() - self._read_s > KEEP_UP_S:
            self._read_all()

    def _read_all(self) -> None:
        now_s = self._clock()
        since_s = now_s - self._read_s
        self._read_s = now_s
        self._unread = {
            kind: joules + self._joules(kind, since_s) for kind, joules in self._unread.items()
        }

    def _joules(self, kind: str, since_s: float) -> float:
        joules = math.nan
        if kind not in self._failed:
            try:
                joules = math.fsum(counter.joules(since_s) for counter in self._counters[kind])
            except Exception:
                # OSError, ValueError, NVML's own: the value is lost, and training continues without
                # it
                joules = math.nan
        if math.isnan(joules):
            self._failed.add(kind)
        return joules


def find_counters(
    communicator: Communicator,
    gpu: str | None,
    gpu_reason: str = "",
    powercap: Path = POWERCAP,
    nvml: Nvml | None = None,
    clock: Callable[[], float] = time.monotonic,
    boot_id: Path = _BOOT_ID,
) -> EnergyCounters:
    """Returns the counters of this rank. Every rank calls it.

    gpu: NVML's UUID ("GPU-...") of the device of this rank; None, with gpu_reason, if unknown. The
    lowest rank that shares a GPU or a machine reads its counter. A kind counts only if all its
    counters can be read. A counter covers the whole board, or the package without its memory,
    including other processes that use them.
    """
    mine: dict[str, list[Counter]] = {}
    reasons: dict[str, str] = {}
    probes: dict[str, Callable[[], list[Counter]]] = {"cpu": lambda: package_counters(powercap)}
    if gpu is not None or gpu_reason:
        probes["gpu"] = lambda: [gpu_counter(gpu, gpu_reason, nvml)]
    for kind, probe in probes.items():
        try:
            mine[kind], reasons[kind] = probe(), ""
        except Unmeasured as error:
            reasons[kind] = str(error)
    host = socket.gethostname()
    claims: list[Claim] = communicator.allgather_object(
        Claim(host, _machine(host, boot_id), gpu, reasons)
    )
    claims_of = {kind: [claim for claim in claims if kind in claim.reasons] for kind in KINDS}
    job_reasons = {kind: _reason_of_all(some, kind) for kind, some in claims_of.items() if some}
    machine = claims[communicator.rank].machine
    reads = {
        "gpu": gpu is not None
        and communicator.rank == min(rank for rank, claim in enumerate(claims) if claim.gpu == gpu),
        "cpu": communicator.rank
        == min(rank for rank, claim in enumerate(claims) if claim.machine == machine),
    }
    counters = {
        kind: mine.get(kind, []) for kind in KINDS if reads[kind] and job_reasons.get(kind) == ""
    }
    return EnergyCounters(job_reasons, counters, clock)


def _machine(host: str, boot_id: Path) -> str:
    try:
        return boot_id.read_text(encoding="ascii").strip() or host
    except (OSError, ValueError):  # no Linux, or no /proc
        return host


def _reason_of_all(claims: Sequence[Claim], kind: str) -> str:
    """Why counters of this kind cannot be read: empty if all can; else one host's reason, with its
    name unless all have the same reason."""
    reasons = [(claim.host, claim.reasons[kind]) for claim in claims if claim.reasons[kind]]
    if not reasons:
        return ""
    host, reason = reasons[0]
    different = {other for other, _ in reasons}
    if len(reasons) == len(claims) and all(other == reason for _, other in reasons):
        return reason
    more = len(different) - 1
    return f"{host}: {reason}" + (
        f" (and {more} more host{'s' if more > 1 else ''})" if more else ""
    )


def package_counters(powercap: Path) -> list[Counter]:
    """Returns RAPL's counter of each processor package here. Raises Unmeasured if one cannot be
    read."""
    try:
        zones = sorted(path for path in powercap.glob("intel-rapl:*") if _ZONE.match(path.name))
        zones = [
            zone
            for zone in zones
            if (zone / "name").read_text(encoding="ascii").startswith("package-")
        ]
        if not zones:
            raise Unmeasured(f"no {powercap}/intel-rapl here")
        return [_package_counter(zone) for zone in zones]
    except PermissionError as error:
        fix = (
            f"an administrator can open it: chmod a+r {powercap}/intel-rapl:*/energy_uj, at each "
            "boot, as by a udev rule"
        )
        raise Unmeasured(
            f"{error.filename} can be read by root only since CVE-2020-8694; {fix}"
        ) from None
    except (OSError, ValueError) as error:
        raise Unmeasured(
            f"cannot read {powercap}/intel-rapl: {getattr(error, 'strerror', None) or error}"
        ) from None


def _package_counter(zone: Path) -> Counter:
    def microjoules(name: str) -> int:
        return int((zone / name).read_text(encoding="ascii"))

    return Counter(lambda: microjoules("energy_uj") / 1e6, microjoules("max_energy_range_uj") / 1e6)


def gpu_counter(gpu: str | None, gpu_reason: str, nvml: Nvml | None = None) -> Counter:
    """Returns NVML's counter of one GPU. Raises Unmeasured if there is none."""
    driver, handle = whole_gpu(gpu, gpu_reason, nvml)
    try:
        # millijoules since the driver was loaded
        return Counter(lambda: driver.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)
    except driver.NVMLError as error:
        raise Unmeasured(f"NVML has no counter of {gpu}: {error}") from None


def whole_gpu(gpu: str | None, gpu_reason: str, nvml: Nvml | None = None) -> tuple[Nvml, Any]:
    """Returns NVML and its handle of one GPU. gpu, gpu_reason: as of find_counters(). Raises
    Unmeasured for a part of a GPU, and without NVML."""
    if gpu is None:
        raise Unmeasured(gpu_reason)
    if gpu.startswith("MIG-"):
        raise Unmeasured(f"{gpu} is a part of a GPU (MIG), and NVML counts whole ones")
    nvml = nvml or _pynvml()
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu)
        if _is_divided(nvml, handle):
            raise Unmeasured(f"{gpu} is divided (MIG), and NVML counts whole GPUs")
    except nvml.NVMLError as error:
        raise Unmeasured(f"NVML has no counter of {gpu}: {error}") from None
    return nvml, handle


def _pynvml() -> Nvml:
    try:
        import pynvml
    except ImportError:
        raise Unmeasured("nvidia-ml-py is not installed: pip install nvidia-ml-py") from None
    module: Nvml = pynvml
    return module


def _is_divided(nvml: Nvml, handle: Any) -> bool:
    try:
        return nvml.nvmlDeviceGetMigMode(handle)[0] == 1
    except nvml.NVMLError:  # a GPU that cannot be divided
        return False
