"""Room: how much more memory this rank may take on its host, and what limits it."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config

_V2, _V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
_UNLIMITED = 2**60  # what version 1 says where there is no limit is larger


class Room(NamedTuple):
    """The least of any limit."""

    bytes: int
    limit: str  # for people: "ulimit -v", "ulimit -d", "the container's memory.max", "free memory of the host"


def room_of_rank(config: Config, communicator: Communicator) -> Room:
    """Room of the GPU that this rank trains on, or of its host."""
    framework: Any = plugins.load("frameworks", config.framework, config.where("framework"))
    free = framework.free_device_bytes(config, communicator) if hasattr(framework, "free_device_bytes") else None
    return room(communicator.local_size) if free is None else Room(free, "the free memory of the GPU")


def room(local_size: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Room:
    """Room of one of so many ranks on the host, beyond what this process has by now; without a limit that can be read, infinitely much."""
    return min([*_limits(proc), *_container(local_size, proc, cgroups), *_free(local_size, proc)], default=Room(_UNLIMITED, "no limit"))


def _limits(proc: Path) -> Iterator[Room]:
    """Limits of the addresses of this process, and of those among them that it may write to and shares with no other."""
    for which, field, name in ((resource.RLIMIT_AS, "VmSize", "ulimit -v"), (resource.RLIMIT_DATA, "VmData", "ulimit -d")):
        soft, _ = resource.getrlimit(which)
        size = _number(proc / "self" / "status", rf"^{field}:\s*(\d+) kB$")
        if soft != resource.RLIM_INFINITY and size is not None:
            yield Room(max(0, soft - 1024 * size), name)


def _container(local_size: int, proc: Path, cgroups: Path) -> Iterator[Room]:
    """Limits of the control group of this process and those around it, in version 2 and 1; a container sees its own as the root."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        if controllers not in ("", "memory"):
            continue
        root, (limit_name, used_name) = (cgroups / "memory", _V1) if controllers else (cgroups, _V2)
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            limit, used = _number(group / limit_name, r"^(\d+)$"), _number(group / used_name, r"^(\d+)$")
            if limit is not None and used is not None and limit < _UNLIMITED:
                cached = _number(group / "memory.stat", r"^(?:total_)?inactive_file (\d+)$") or 0  # given back when it is needed
                yield Room(max(0, limit - used + cached) // local_size, f"the container's {limit_name}")
            if group == root:
                break


def _free(local_size: int, proc: Path) -> Iterator[Room]:
    free = _number(proc / "meminfo", r"^MemAvailable:\s*(\d+) kB$")
    if free is not None:
        yield Room(1024 * free // local_size, "the free memory of the host")


def _number(path: Path, pattern: str) -> int | None:
    found = re.search(pattern, _text(path), re.MULTILINE)
    return int(found[1]) if found else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
