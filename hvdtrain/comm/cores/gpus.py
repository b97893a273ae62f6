"""The PCI addresses of the GPUs that a process sees, from /proc and /sys, without a GPU library."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.comm.launcher_variables import VISIBLE_DEVICES, listed_devices

# of AMD's runtime, which filters GPUs before HIP counts them
_ROCR = "ROCR_VISIBLE_DEVICES"
_HIP = "HIP_VISIBLE_DEVICES"


class PciGpu(NamedTuple):
    """A GPU of this host."""

    address: str  # "0000:c1:00.0"
    uuid: str  # "GPU-...", or empty


def address_of(local_rank: int, environ: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """The address of the GPU of a local rank; None if it is not known which one that is.

    The order is that of PCI addresses (NVIDIA) or of the driver's nodes (AMD). CUDA has the same
    order if the GPUs of a host are alike, or with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    gpus = _nvidia(root)
    if gpus:
        gpus = _visible(gpus, listed_devices(environ))
    else:
        gpus = _visible(_amd(root), _listed(environ, _ROCR))
        gpus = _visible(gpus, _listed(environ, _HIP) or listed_devices(environ))
    return gpus[local_rank % len(gpus)].address if gpus else None


def _visible(gpus: Sequence[PciGpu], names: Sequence[str] | None) -> list[PciGpu]:
    """The GPUs that a list of numbers or UUIDs names, in its order; none if one of them is not
    known here, such as a part of a GPU."""
    if names is None:
        return list(gpus)
    found = []
    for name in names:
        named = [
            gpu
            for number, gpu in enumerate(gpus)
            if name == str(number) or (name.startswith("GPU-") and gpu.uuid.startswith(name))
        ]
        if len(named) != 1:
            return []
        found += named
    return found


def _listed(environ: Mapping[str, str], name: str) -> list[str] | None:
    return listed_devices({VISIBLE_DEVICES: environ[name]}) if name in environ else None


def _nvidia(root: Path) -> list[PciGpu]:
    """NVIDIA's GPUs that this process may open: a batch system may show all of a host's here, and
    permit some."""
    found = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*:*:*.*")):
        facts = dict(re.findall(r"^([\w ]+):\s*(.*?)\s*$", _text(folder / "information"), re.M))
        if _opens(root / f"dev/nvidia{facts.get('Device Minor', '')}"):
            found.append(PciGpu(folder.name.lower(), facts.get("GPU UUID", "")))
    return found


def _amd(root: Path) -> list[PciGpu]:
    """AMD's GPUs that this process may open, in the order of the driver's nodes."""
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*")
    found = []
    for node in sorted(nodes, key=lambda path: int(path.name)):
        facts = {
            name: int(value)
            for name, value in re.findall(r"^(\w+) (\d+)$", _text(node / "properties"), re.M)
        }
        place = facts.get("location_id", 0)  # 8 bits of the bus, 5 of the device, 3 of the function
        if facts.get("simd_count") and _opens(
            root / f"dev/dri/renderD{facts.get('drm_render_minor', '')}"
        ):
            domain = f"{facts.get('domain', 0):04x}"
            found.append(PciGpu(f"{domain}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}", ""))
    return found


def _opens(path: Path) -> bool:
    """Whether the device may be opened: access() knows nothing of a cgroup that forbids it."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
