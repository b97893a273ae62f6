"""The GPUs of this host that a process may use, by the files of the drivers and the environment.

No GPU is opened: JAX and CUDA read their environment when they are first used."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hvdtrain.comm.launcher_variables import listed_devices

# of ROCm: the first is of its driver's interface, the others are of HIP, after it
_LISTS_OF_AMD = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


class DriverFiles(NamedTuple):
    """Where the drivers of GPUs have their files."""

    dev: Path = Path("/dev")
    sys: Path = Path("/sys")

    def nvidia(self) -> int:
        """The number of NVIDIA's GPUs. A container may have nvidia4 and nvidia5 only; CUDA numbers
        them from 0."""
        return len(list(self.dev.glob("nvidia[0-9]*")))

    def amd(self) -> int:
        """The number of AMD's GPUs: nodes of the driver kfd that have compute units, unlike a
        processor. A node that a container may not use cannot be read."""
        count = 0
        for properties in self.sys.glob("class/kfd/kfd/topology/nodes/*/properties"):
            with contextlib.suppress(OSError):
                units = re.search(r"^simd_count (\d+)$", properties.read_text(), re.MULTILINE)
                count += bool(units and int(units[1]))
        return count

    def visible_nvidia(self, environ: Mapping[str, str]) -> int:
        """The number of GPUs that CUDA_VISIBLE_DEVICES lists, or that the host has."""
        listed = listed_devices(environ)
        return self.nvidia() if listed is None else len(listed)

    def visible_amd(self, environ: Mapping[str, str]) -> int:
        """The number of GPUs in the shortest list of ROCm's variables, or that the host has."""
        lists = (listed_devices(environ, name) for name in _LISTS_OF_AMD)
        return min((len(names) for names in lists if names is not None), default=self.amd())

    def hidden_nvidia(self, environ: Mapping[str, str]) -> str:
        """The files of GPUs that CUDA would show: "/dev/nvidia0 and 3 more"; empty if there are
        none, or if CUDA_VISIBLE_DEVICES hides all."""
        files = sorted(self.dev.glob("nvidia[0-9]*"))
        if not files or not self.visible_nvidia(environ):
            return ""
        return f"{files[0]}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")

    def hidden_amd(self, environ: Mapping[str, str]) -> str:
        """The driver's file for GPUs of AMD that ROCm would show; empty if there are none."""
        return f"{self.dev / 'kfd'}" if self.amd() and self.visible_amd(environ) else ""


HERE = DriverFiles()
