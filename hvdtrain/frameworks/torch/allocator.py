"""Freed memory stays with the process: returning it to the system and asking for it again cost a CPU step up to 15,000 page faults."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEEP, DEFAULT = (2**31 - 1, 2**30), (64 << 20, 32 << 20)  # (trim, mmap): bytes; what glibc's own thresholds grow to at most
ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep(wanted: bool = True) -> bool:
    """Whether glibc now keeps what is freed, up to 2 GiB at the heap's end. Settings in the environment win; no other libc has this."""
    if any(name in os.environ for name in ENVIRONMENT):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trim, mmap = KEEP if wanted else DEFAULT
    if mallopt(M_MMAP_THRESHOLD, mmap) != 1 and mallopt(M_MMAP_THRESHOLD, DEFAULT[1]) != 1:  # older glibc takes 32 MiB at most
        return False
    return mallopt(M_TRIM_THRESHOLD, trim) == 1 and wanted
