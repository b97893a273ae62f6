"""Freed memory stays with the process: returning it to the system and asking for it again cost a CPU step up to 15,000 page faults.

Of shard.stage=3 large memory does not stay: weights of blocks come and go among activations, and would leave holes between them.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEEP, DEFAULT = (2**31 - 1, 2**30), (64 << 20, 32 << 20)  # (trim, mmap): bytes; what glibc's own thresholds grow to at most
LARGE = 2**18  # bytes
ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep(wanted: bool = True) -> bool:
    """Whether glibc now keeps what is freed, up to 2 GiB at the heap's end. Settings in the environment win; no other libc has this."""
    mallopt = _mallopt()
    if mallopt is None:
        return False
    trim, mmap = KEEP if wanted else DEFAULT
    if mallopt(M_MMAP_THRESHOLD, mmap) != 1 and mallopt(M_MMAP_THRESHOLD, DEFAULT[1]) != 1:  # older glibc takes 32 MiB at most
        return False
    return mallopt(M_TRIM_THRESHOLD, trim) == 1 and wanted


def return_large() -> bool:
    """Whether glibc now returns what has LARGE bytes or more as soon as it is freed. Settings in the environment win here, too.

    12 layers of width 256 and 256 tokens, adamw, stage 3 on 2 ranks: 156 MB of resident memory in place of 270, of which 151 are tensors
    and libraries; the time of a step is the same (benchmarks/memory.md).
    """
    mallopt = _mallopt()
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, LARGE) == 1


def _mallopt() -> Any:
    """glibc's; None where the environment has settings of its own, and with another libc."""
    return None if any(name in os.environ for name in ENVIRONMENT) else getattr(ctypes.CDLL(None), "mallopt", None)
