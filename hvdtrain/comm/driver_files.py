"""The GPUs of this host that a process may use, by the files of the drivers and the environment.

No GPU library is loaded: JAX and CUDA read their environment when they are first used."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.comm.launcher_variables import VISIBLE_DEVICES, listed_devices

# read by AMD's runtime, which filters GPUs before HIP counts them
_ROCR = "ROCR_VISIBLE_DEVICES"
_HIP = "HIP_VISIBLE_DEVICES"
# ROCm's variables: its runtime reads the first, then HIP reads the others
_LISTS_OF_AMD = (_ROCR, _HIP, "GPU_DEVICE_ORDINAL")


class PciGpu(NamedTuple):
    """A GPU of this host."""

    address: str  # "0000:c1:00.0"
    uuid: str  # "GPU-...", or empty


class DriverFiles(NamedTuple):
    """The files of the GPU drivers: folders below which they are read."""

    dev: Path = Path("/dev")
    sys: Path = Path("/sys")
    proc: Path = Path("/proc")

    @classmethod
    def under(cls, root: Path) -> DriverFiles:
        return cls(root / "dev", root / "sys", root / "proc")

    def nvidia(self) -> int:
        """Returns the number of NVIDIA's GPUs. A container may have nvidia4 and nvidia5 only; CUDA
        numbers them from 0."""
        return len(self._nvidia_devices())

    def amd(self) -> int:
        """Returns the number of AMD's GPUs."""
        return len(self._amd_nodes())

    def visible_nvidia(self, environ: Mapping[str, str]) -> int:
        """Returns the number of GPUs that CUDA_VISIBLE_DEVICES lists, or that the host has."""
        listed = listed_devices(environ)
        return self.nvidia() if listed is None else len(listed)

    def visible_amd(self, environ: Mapping[str, str]) -> int:
        """Returns the number of GPUs in the shortest list of ROCm's variables, or that the host
        has."""
        lists = (listed_devices(environ, name) for name in _LISTS_OF_AMD)
        return min((len(names) for names in lists if names is not None), default=self.amd())

    def hidden_nvidia(self, environ: Mapping[str, str]) -> str:
        """Returns the files of GPUs that CUDA would show: "/dev/nvidia0 and 3 more"; empty if there
        are none, or if CUDA_VISIBLE_DEVICES hides all."""
        files = self._nvidia_devices()
        if not files or not self.visible_nvidia(environ):
            return ""
        return f"{files[0]}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")

    def hidden_amd(self, environ: Mapping[str, str]) -> str:
        """Returns the driver's file for GPUs of AMD that ROCm would show; empty if there are
        none."""
        return f"{self.dev / 'kfd'}" if self.amd() and self.visible_amd(environ) else ""

    def address_of(self, local_rank: int, environ: Mapping[str, str]) -> str | None:
        """Returns the PCI address of a local rank's GPU; None if it is unknown.

        GPUs are sorted by PCI address (NVIDIA) or by the driver's nodes (AMD). CUDA uses the same
        order if the GPUs of a host are alike, or with CUDA_DEVICE_ORDER=PCI_BUS_ID.
        """
        gpus = self._permitted_nvidia()
        if gpus:
            gpus = _visible(gpus, listed_devices(environ))
        else:
            gpus = _visible(self._permitted_amd(), listed_devices(environ, _ROCR))
            names = listed_devices(environ, _HIP) or listed_devices(environ, VISIBLE_DEVICES)
            gpus = _visible(gpus, names)
        return gpus[local_rank % len(gpus)].address if gpus else None

    def _nvidia_devices(self) -> list[Path]:
        return sorted(self.dev.glob("nvidia[0-9]*"))

    def _permitted_nvidia(self) -> list[PciGpu]:
        """Returns NVIDIA's GPUs that this process may open: a batch system may list all GPUs of a
        host here but permit only some."""
        found = []
        for folder in sorted(self.proc.glob("driver/nvidia/gpus/*:*:*.*")):
            facts = dict(re.findall(r"^([\w ]+):\s*(.*?)\s*$", _text(folder / "information"), re.M))
            if _opens(self.dev / f"nvidia{facts.get('Device Minor', '')}"):
                found.append(PciGpu(folder.name.lower(), facts.get("GPU UUID", "")))
        return found

    def _amd_nodes(self) -> list[dict[str, int]]:
        """Returns the properties of the nodes of the driver kfd that have compute units, in its
        order. A node of a processor has none; a node that a container may not use cannot be
        read."""
        nodes = self.sys.glob("class/kfd/kfd/topology/nodes/[0-9]*")
        every = [
            dict(re.findall(r"^(\w+) (\d+)$", _text(node / "properties"), re.M))
            for node in sorted(nodes, key=lambda path: int(path.name))
        ]
        numbers = [{name: int(value) for name, value in facts.items()} for facts in every]
        return [facts for facts in numbers if facts.get("simd_count")]

    def _permitted_amd(self) -> list[PciGpu]:
        """Returns AMD's GPUs that this process may open, in the order of the driver's nodes."""
        found = []
        for facts in self._amd_nodes():
            # 8 bits of the bus, 5 of the device, 3 of the function
            place = facts.get("location_id", 0)
            if _opens(self.dev / f"dri/renderD{facts.get('drm_render_minor', '')}"):
                domain = f"{facts.get('domain', 0):04x}"
                address = f"{domain}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"
                found.append(PciGpu(address, ""))
        return found


HERE = DriverFiles()


def _visible(gpus: Sequence[PciGpu], names: Sequence[str] | None) -> list[PciGpu]:
    """Returns the GPUs that a list of numbers or UUIDs names, in its order; no GPU if one name is
    unknown here, such as a part of a GPU."""
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
