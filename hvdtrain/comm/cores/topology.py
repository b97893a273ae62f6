"""The cores and NUMA nodes of this host, and which cores are next to a PCI device, from /sys."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NODE = re.compile(r"node([0-9]+)")


def read_ranges(text: str) -> tuple[int, ...]:
    """Parses the kernel's list of numbers, "0-3,8", to (0, 1, 2, 3, 8). Raises ValueError for
    anything else."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))


def number_ranges(numbers: Iterable[int]) -> str:
    """Formats [0, 1, 2, 5] as "0-2,5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


class Topology:
    """The hardware threads of a host, which /sys calls CPUs and users call cores.

    Missing information in /sys is replaced by the simplest case: one NUMA node, one thread in each
    core.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        """root: the folder that contains sys/; tests use another one."""
        self._sys = root / "sys"
        self._node_of = {
            core: node for node, cores in sorted(self._nodes().items()) for core in cores
        }

    def node_of(self, core: int) -> int:
        return self._node_of.get(core, 0)

    def nodes_of(self, cores: Iterable[int]) -> list[int]:
        """Returns the NUMA nodes of some cores, in order."""
        return sorted({self.node_of(core) for core in cores})

    def physical(self, cores: Collection[int]) -> list[tuple[int, ...]]:
        """Returns the physical cores in the order of their NUMA nodes; each is a tuple of its
        threads that are in `cores`."""
        allowed = {*cores}
        found = {
            tuple(sorted({core, *self._siblings(core)} & allowed)): self.node_of(core)
            for core in allowed
        }
        return sorted(found, key=lambda threads: (found[threads], threads))

    def near(self, address: str) -> tuple[int, ...]:
        """Returns the cores next to the PCI device "0000:c1:00.0"; empty if /sys does not list
        them.

        A device without a NUMA node lists all cores in its local_cpulist, which is not informative.
        """
        if not _PCI.fullmatch(address):
            return ()
        device = self._sys / "bus/pci/devices" / address
        try:
            if int(_read(device / "numa_node") or -1) < 0:
                return ()
            return read_ranges(_read(device / "local_cpulist"))
        except ValueError:
            return ()

    def _nodes(self) -> dict[int, tuple[int, ...]]:
        folder = self._sys / "devices/system/node"
        try:
            names = [match for path in folder.iterdir() if (match := _NODE.fullmatch(path.name))]
            return {
                int(name[1]): read_ranges(_read(folder / name[0] / "cpulist")) for name in names
            }
        except (OSError, ValueError):
            return {}

    def _siblings(self, core: int) -> tuple[int, ...]:
        path = self._sys / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        try:
            return read_ranges(_read(path))
        except ValueError:
            return ()


def _read(path: Path) -> str:
    """Returns the text of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
