"""A model is counted while it is made: one that the host cannot have is an error before it takes memory."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as hooks

_MOST_PARTS = 2**18  # modules, parameters and buffers of a model, each of which takes 4 kB beside its numbers


class TooLarge(Exception):
    """A model has more parts or bytes than this process can have."""


@contextlib.contextmanager
def counted(most_bytes: float) -> Iterator[None]:
    """Inside, TooLarge is raised where the modules that this thread makes have more than most_bytes, or more than so many parts."""
    thread, parts, nbytes = threading.get_ident(), 0, 0

    def count(module: torch.nn.Module, name: str, part: Any) -> None:
        nonlocal parts, nbytes
        if threading.get_ident() != thread:
            return
        parts += 1
        nbytes += part.nbytes if isinstance(part, torch.Tensor) else 0
        if parts > _MOST_PARTS:
            raise TooLarge(f"more than {_MOST_PARTS} layers and parameters")
        if nbytes > most_bytes:
            raise TooLarge(f"more than the {most_bytes / 2**30:.1f} GiB of memory that this process can have")

    handles = [
        hooks.register_module_parameter_registration_hook(count),
        hooks.register_module_buffer_registration_hook(count),
        hooks.register_module_module_registration_hook(count),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def made_within_limits(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """What make() returns, which is made without memory before. Raises TooLarge, and what make() does."""
    probe = torch.empty(2**16)
    if type(probe) is not torch.Tensor or probe.device.type != "cpu":  # of a caller who makes models without memory
        with counted(float("inf")):
            return make()
    before = torch.get_rng_state()
    try:
        with counted(most_bytes()), torch.device("meta"):
            make()
    except TooLarge:
        raise
    except Exception:  # a constructor that reads numbers of its tensors; any other error comes again
        pass
    torch.set_rng_state(before)
    with counted(most_bytes()):
        return make()


def most_bytes() -> float:
    """The memory of the host, or the limit of this process."""
    limits = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return float(min([host, *(limit for limit in limits if limit != resource.RLIM_INFINITY)]))
