"""Counts a model while it is created: one that is too large for the host is an error before it
takes memory."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.nn.modules import module as hooks
from torch.nn.parameter import is_lazy

Count = Callable[[torch.nn.Module, str, Any], None]
# modules, parameters and buffers of a model; each takes 4 kB in addition to its numbers
_MOST_PARTS = 2**18


class TooLarge(Exception):
    """A model has more parts or bytes than this process can have."""


@contextlib.contextmanager
def counted(
    most_bytes: float,
    most_parts: int = 2 * _MOST_PARTS,
    *,
    of_meta: bool = False,
    error: type[BaseException] | None = None,
) -> Iterator[None]:
    """Within the context, raises TooLarge if the modules that this thread creates have more bytes
    on the host, or more parts.

    of_meta: count tensors without memory as if they had it. error: raised instead for too many
    bytes.
    """
    too_large = error or TooLarge
    parts = 0
    nbytes = 0
    seen: set[int] = set()  # a tensor may be registered again, as a tied one

    def count(module: torch.nn.Module, name: str, part: Any) -> None:
        nonlocal parts, nbytes
        parts += 1
        nbytes += 0 if id(part) in seen else _bytes(part, of_meta)
        seen.add(id(part))
        if parts > most_parts:
            raise TooLarge(f"more than {most_parts} layers and parameters")
        if nbytes > most_bytes:
            raise too_large(
                f"more than the {most_bytes / 2**30:.1f} GiB of memory that this process can have"
            )

    with _REGISTRATIONS.seen_by(count):
        yield


class _Registrations:
    """torch's hooks for everything that modules register. They are not removed: torch keeps them in
    one dict of the process, which must not change while another thread creates a model."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._are_hooked = False
        self._counts: dict[int, list[Count]] = {}  # by thread

    @contextlib.contextmanager
    def seen_by(self, count: Count) -> Iterator[None]:
        """Within the context, calls count(module, name, part) for everything that this thread
        registers."""
        thread = threading.get_ident()
        with self._lock:
            if not self._are_hooked:
                hooks.register_module_parameter_registration_hook(self._call)
                hooks.register_module_buffer_registration_hook(self._call)
                hooks.register_module_module_registration_hook(self._call)
                self._are_hooked = True
            self._counts.setdefault(thread, []).append(count)
        try:
            yield
        finally:
            with self._lock:
                self._counts[thread].pop()
                if not self._counts[thread]:
                    del self._counts[thread]

    def _call(self, module: torch.nn.Module, name: str, part: Any) -> None:
        for count in self._counts.get(threading.get_ident(), ()):
            count(module, name, part)


_REGISTRATIONS = _Registrations()


def _bytes(part: Any, of_meta: bool) -> int:
    """Returns the size of a tensor on the host; 0 for a module, for a tensor of unknown shape, and
    for a tensor of FakeTensorMode."""
    if not isinstance(part, torch.Tensor) or is_lazy(part) or isinstance(part, FakeTensor):
        return 0
    return part.nbytes if part.device.type == "cpu" or of_meta else 0


def made_within_limits(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Calls make(), first without memory. Raises TooLarge, and the errors of make()."""
    probe = torch.empty(2**16)
    if (
        type(probe) is not torch.Tensor or probe.device.type != "cpu"
    ):  # for a caller who creates models without memory
        with counted(float("inf"), _MOST_PARTS):
            return make()
    before = torch.get_rng_state()
    try:
        with counted(most_bytes(), _MOST_PARTS, of_meta=True), torch.device("meta"):
            make()
    except TooLarge:
        raise
    except (
        Exception
    ):  # a constructor that reads values of its tensors; any other error is raised again later
        pass
    torch.set_rng_state(before)
    return make()


def most_bytes() -> float:
    """Returns the memory of the host, or the limit of this process."""
    limits = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return float(min([host, *(limit for limit in limits if limit != resource.RLIM_INFINITY)]))
