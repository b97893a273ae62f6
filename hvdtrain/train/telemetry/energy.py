"""How many joules a job takes, read from counters of the hardware: NVML's of each GPU and RAPL's of each processor package."""

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
MOST_W = 600.0  # of one processor package
KEEP_UP_S = 20.0
PAUSE_S = 1.0  # between two looks at the counters: each is a call of the driver, or a file of the kernel
KINDS = {"gpu": ("GPUs", "NVML"), "cpu": ("processors", "RAPL")}  # kind -> what is measured, and by what
_ZONE = re.compile(r"intel-rapl:\d+$")  # of AMD's processors too; intel-rapl:0:0 is a part of intel-rapl:0
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Nvml(Protocol):
    """What is used of the module pynvml."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> Any: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...
    def nvmlDeviceGetMigMode(self, handle: Any) -> Sequence[int]: ...
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int: ...


class Claim(NamedTuple):
    """What one rank has found; all ranks exchange these."""

    host: str
    machine: str  # the same for two containers of one machine, whose host names differ
    gpu: str | None
    why: dict[str, str]  # kind -> "", or why its counter cannot be read from here; no "gpu" where this rank uses none


class Counter:
    """A meter of hardware: joules since the last look. `modulus` joules is where it starts again at 0; inf: never."""

    def __init__(self, read_j: Callable[[], float], modulus: float = math.inf) -> None:
        self._read_j, self._modulus = read_j, modulus
        self._last = read_j()

    def joules(self, since_s: float = 0.0) -> float:
        """NaN where it went backwards, since the driver was loaded anew, or may have started again more than once since the last look,
        since_s ago. Raises what reading raises.
        """
        now = self._read_j()
        step, self._last = now - self._last, now
        if step < 0:
            step = step + self._modulus if math.isfinite(self._modulus) else math.nan
        return step if since_s * MOST_W < self._modulus else math.nan


class Unmeasured(Exception):
    """Why there is no counter."""


class Energy:
    """`why`: kind -> "" where it is measured, else the reason; the same on all ranks. No "gpu" where no rank uses one."""

    def __init__(self, why: dict[str, str], counters: Mapping[str, Sequence[Counter]], clock: Callable[[], float]) -> None:
        self.why, self._counters, self._clock = why, {kind: counters.get(kind, ()) for kind in KINDS}, clock
        self._looked_s = clock()
        self._failed: set[str] = set()
        self._kept = dict.fromkeys(KINDS, 0.0)  # joules that nobody has read yet

    def read(self, now: bool = False) -> dict[str, float]:
        """{"joules.gpu": J, "joules.cpu": J} since the last read on this rank; added up over all ranks they are the job's.

        0.0 for what another rank reads, or nobody measures. Counters are looked at once a second at most, unless `now`: in between it
        is 0.0, and comes with a later read. RAPL's start again at 0 (64 to 262 kJ: some minutes under load): see keep_up().
        A counter that fails makes its kind NaN for ever, and with it the sum over ranks, on all of them.
        """
        if not now and self._clock() - self._looked_s < PAUSE_S:
            return {f"joules.{kind}": math.nan if kind in self._failed else 0.0 for kind in KINDS}
        self._look_at_all()
        kept, self._kept = self._kept, dict.fromkeys(KINDS, 0.0)
        return {f"joules.{kind}": joules for kind, joules in kept.items()}

    def keep_up(self) -> None:
        """Between two reads that may be far apart: no counter starts again twice unseen. A tenth of a microsecond if it is too early."""
        if self._clock() - self._looked_s > KEEP_UP_S:
            self._look_at_all()

    def _look_at_all(self) -> None:
        now_s = self._clock()
        since_s, self._looked_s = now_s - self._looked_s, now_s
        self._kept = {kind: joules + self._look(kind, since_s) for kind, joules in self._kept.items()}

    def _look(self, kind: str, since_s: float) -> float:
        joules = math.nan
        if kind not in self._failed:
            try:
                joules = math.fsum(counter.joules(since_s) for counter in self._counters[kind])
            except Exception:  # OSError, ValueError, NVML's own: whichever it is, the number is gone, and training is not worth less
                joules = math.nan
        if math.isnan(joules):
            self._failed.add(kind)
        return joules


def measure(
    communicator: Communicator,
    gpu: str | None,
    gpu_why: str = "",
    powercap: Path = POWERCAP,
    nvml: Nvml | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Energy:
    """Every rank calls it. gpu: NVML's UUID ("GPU-...") of the device of this rank; None, with gpu_why, where that is not known.

    The lowest rank of those that share a GPU, or a machine, reads its counter. A kind counts only if all its counters can be read.
    A counter is of the whole board, or of the package without its memory: whoever else uses them is counted too.
    """
    why, counters = dict[str, str](), dict[str, list[Counter]]()
    probes: dict[str, Callable[[], list[Counter]]] = {"cpu": lambda: packages(powercap)}
    if gpu is not None or gpu_why:
        probes["gpu"] = lambda: [board(gpu, gpu_why, nvml)]
    for kind, probe in probes.items():
        try:
            counters[kind], why[kind] = probe(), ""
        except Unmeasured as error:
            why[kind] = str(error)
    host = socket.gethostname()
    claims: list[Claim] = communicator.allgather_object(Claim(host, _machine(host), gpu, why))
    joined = {kind: _reason([c for c in claims if kind in c.why], kind) for kind in KINDS if any(kind in c.why for c in claims)}
    first = {
        "gpu": gpu is not None and communicator.rank == min(rank for rank, c in enumerate(claims) if c.gpu == gpu),
        "cpu": communicator.rank == min(rank for rank, c in enumerate(claims) if c.machine == claims[communicator.rank].machine),
    }
    mine = {kind: counters.get(kind, []) for kind in KINDS if first[kind] and joined.get(kind) == ""}
    return Energy(joined, mine, clock)


def words(why: Mapping[str, str]) -> str:
    """One line for people: energy  GPUs by NVML; processors not measured: no /sys/class/powercap/intel-rapl here."""
    parts = [f"{KINDS[kind][0]} {f'not measured: {why[kind]}' if why[kind] else f'by {KINDS[kind][1]}'}" for kind in KINDS if kind in why]
    return f"energy  {'; '.join(parts)}"


def _machine(host: str) -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip() or host
    except (OSError, ValueError):  # no Linux, or no /proc
        return host


def _reason(claims: Sequence[Claim], kind: str) -> str:
    """Empty where all can be read; else one host's reason, named unless it is everybody's."""
    reasons = [(claim.host, claim.why[kind]) for claim in claims if claim.why[kind]]
    if not reasons:
        return ""
    host, reason = reasons[0]
    if len(reasons) == len(claims) and all(other == reason for _, other in reasons):
        return reason
    more = len({other for other, _ in reasons}) - 1
    return f"{host}: {reason}" + (f" (and {more} more host{'s' * (more > 1)})" if more else "")


def packages(powercap: Path) -> list[Counter]:
    """RAPL's counter of each processor package here; Unmeasured where one cannot be read."""
    try:
        zones = sorted(path for path in powercap.glob("intel-rapl:*") if _ZONE.match(path.name))
        zones = [zone for zone in zones if (zone / "name").read_text(encoding="ascii").startswith("package-")]
        if not zones:
            raise Unmeasured(f"no {powercap}/intel-rapl here")
        return [_package(zone) for zone in zones]
    except PermissionError as error:
        fix = f"an administrator can open it: chmod a+r {powercap}/intel-rapl:*/energy_uj, at each boot, as by a udev rule"
        raise Unmeasured(f"{error.filename} is for root alone since CVE-2020-8694; {fix}") from None
    except (OSError, ValueError) as error:
        raise Unmeasured(f"cannot read {powercap}/intel-rapl: {getattr(error, 'strerror', None) or error}") from None


def _package(zone: Path) -> Counter:
    def microjoules(name: str) -> int:
        return int((zone / name).read_text(encoding="ascii"))

    return Counter(lambda: microjoules("energy_uj") / 1e6, microjoules("max_energy_range_uj") / 1e6)


def board(gpu: str | None, gpu_why: str, nvml: Nvml | None = None) -> Counter:
    """NVML's counter of one GPU; Unmeasured where there is none."""
    if gpu is None:
        raise Unmeasured(gpu_why)
    if gpu.startswith("MIG-"):
        raise Unmeasured(f"{gpu} is a part of a GPU (MIG), and NVML counts whole ones")
    nvml = nvml or _pynvml()
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu)
        if _in_parts(nvml, handle):
            raise Unmeasured(f"{gpu} is divided (MIG), and NVML counts whole GPUs")
        return Counter(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)  # millijoules since the driver was loaded
    except nvml.NVMLError as error:
        raise Unmeasured(f"NVML has no counter of {gpu}: {error}") from None


def _pynvml() -> Nvml:
    try:
        import pynvml
    except ImportError:
        raise Unmeasured("nvidia-ml-py is not installed: pip install nvidia-ml-py") from None
    module: Nvml = pynvml
    return module


def _in_parts(nvml: Nvml, handle: Any) -> bool:
    try:
        return nvml.nvmlDeviceGetMigMode(handle)[0] == 1
    except nvml.NVMLError:  # a GPU that cannot be divided
        return False
